//! Bytes and arguments as text that both sides write: hexadecimal digits and words of a shell.

use std::fmt::Write as _;

/// Bytes in lower-case hexadecimal digits, as `sha256` fields hold them.
pub fn hex(bytes: impl AsRef<[u8]>) -> String {
    let bytes = bytes.as_ref();
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// A text as one word of a POSIX shell, always in single quotes.
pub fn shell_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_two_digits_each_and_quotes_end_the_quoted_part() {
        assert_eq!(hex([0, 0x0a, 0xff]), "000aff");
        assert_eq!(shell_quoted("it's $HOME"), r"'it'\''s $HOME'");
    }
}
