//! Recognition of files that are not text, and the errors for them.

use super::ToolError;

/// Bytes at the beginning of a file by which its format is recognized.
pub(super) const HEAD_BYTES: usize = 16;

/// Why bytes are not text.
#[derive(Debug, PartialEq)]
pub(super) enum TextFlaw {
    /// They contain a NUL byte.
    Nul,
    /// A byte that is not UTF-8, and the number of lines before it.
    Byte(u8, u64),
}

pub(super) fn text_in(bytes: Vec<u8>) -> Result<String, TextFlaw> {
    if memchr::memchr(0, &bytes).is_some() {
        return Err(TextFlaw::Nul);
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let bytes = error.as_bytes();
        let lines = memchr::memchr_iter(b'\n', &bytes[..at]).count() as u64;
        TextFlaw::Byte(bytes[at], lines)
    })
}

/// Error for a file that is not text: its size, its format and what can be done with it.
pub(super) fn not_text(
    shown: &str,
    size: Option<u64>,
    head: &[u8],
    flaw: TextFlaw,
    first: u64,
) -> ToolError {
    /// Formats by the first bytes of their files.
    const FORMATS: [(&[u8], &str); 14] = [
        (b"\x7fELF", "an ELF executable or library"),
        (b"\x89PNG", "a PNG image"),
        (b"\xff\xd8\xff", "a JPEG image"),
        (b"GIF8", "a GIF image"),
        (b"%PDF", "a PDF document"),
        (b"PK\x03\x04", "a zip archive"),
        (b"\x1f\x8b", "gzip data"),
        (b"BZh", "bzip2 data"),
        (b"\xfd7zXZ", "xz data"),
        (b"\x28\xb5\x2f\xfd", "zstd data"),
        (b"SQLite format 3", "an SQLite database"),
        (b"\0asm", "a WebAssembly module"),
        (b"\xff\xfe", "UTF-16 text"),
        (b"\xfe\xff", "UTF-16 text"),
    ];
    let size = size.map_or_else(String::new, |size| format!(" ({size} bytes)"));
    let format = FORMATS.iter().find(|(magic, _)| head.starts_with(magic));
    ToolError(match (format, flaw) {
        (Some((_, format @ "UTF-16 text")), _) => format!(
            "`{shown}`{size} is {format}, not UTF-8; exec_command with `iconv -f UTF-16 -t UTF-8 \
             {shown}` converts it"
        ),
        (Some((_, format)), _) => format!(
            "`{shown}`{size} is {format}, not text; exec_command can examine it, for example with \
             `file` or `xxd`"
        ),
        (None, TextFlaw::Nul) => format!(
            "`{shown}`{size} is binary data with NUL bytes, not text; exec_command can examine it, \
             for example with `file` or `xxd`"
        ),
        (None, TextFlaw::Byte(byte, lines)) => format!(
            "`{shown}`{size} is not UTF-8 text: byte 0x{byte:02X} in line {}; exec_command with \
             `iconv -f LATIN1 -t UTF-8 {shown}` converts it, if it is Latin-1",
            first + lines
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_not_text_are_named_with_size_kind_and_position() {
        let error = |bytes: &[u8], first| {
            let head = &bytes[..bytes.len().min(HEAD_BYTES)];
            let flaw = text_in(bytes.to_vec()).unwrap_err();
            not_text("f", Some(bytes.len() as u64), head, flaw, first).0
        };
        for (bytes, expected) in [
            (
                &b"\x89PNG\r\n\x1a\n"[..],
                "`f` (8 bytes) is a PNG image, not",
            ),
            (b"a\0b", "`f` (3 bytes) is binary data with NUL bytes, not"),
            (b"\xff\xfea\0", "`f` (4 bytes) is UTF-16 text, not UTF-8;"),
            (
                b"\n\nna\xefve",
                "`f` (7 bytes) is not UTF-8 text: byte 0xEF in line 7;",
            ),
        ] {
            let error = error(bytes, 5);
            assert!(error.starts_with(expected), "{error}");
        }
        assert_eq!(text_in("é".into()).as_deref(), Ok("é"));
    }
}
