//! Text formats that both sides write: hexadecimal digits and quoted shell words.

use std::fmt::Write as _;

/// Formats bytes as lower-case hexadecimal digits, as in `sha256` fields.
pub fn hex(bytes: impl AsRef<[u8]>) -> String {
    let bytes = bytes.as_ref();
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Quotes a text as one word for a POSIX shell, always with single quotes.
pub fn shell_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_pads_digits_and_shell_quoted_escapes_single_quotes() {
        assert_eq!(hex([0, 0x0a, 0xff]), "000aff");
        assert_eq!(shell_quoted("it's $HOME"), r"'it'\''s $HOME'");
    }
}
