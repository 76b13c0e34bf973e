//! Secret text, such as tokens and keys: redacted in debug output and zeroed when dropped.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use zeroize::Zeroizing;

/// Secret text. Debug output shows `[redacted]`, and the memory is zeroed on drop.
///
/// ```
/// use exec_server_transport::Secret;
///
/// let secret = Secret::from("hunter2");
/// assert_eq!(format!("{secret:?}"), "[redacted]");
/// assert_eq!(secret.expose(), "hunter2");
/// ```
#[derive(Clone)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Maximum size of a secret file in bytes; real secrets are far smaller.
    pub const MAX_FILE_BYTES: u64 = 64 * 1024;

    /// Reads a secret from a file, a pipe or `/dev/fd/N`; removes white space around it.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is not UTF-8, or is longer than [`Secret::MAX_FILE_BYTES`].
    pub fn read(path: &Path) -> io::Result<Self> {
        Self::read_from(File::open(path)?)
    }

    /// Like [`Secret::read`], from an open reader.
    ///
    /// # Errors
    ///
    /// Same as for [`Secret::read`].
    pub fn read_from(input: impl io::Read) -> io::Result<Self> {
        // Allocate the buffer before reading: reallocation would leave copies of the secret in
        // freed memory.
        let mut text = Zeroizing::new(String::with_capacity(4096));
        input
            .take(Self::MAX_FILE_BYTES + 1)
            .read_to_string(&mut text)?;
        if text.len() as u64 > Self::MAX_FILE_BYTES {
            let limit = Self::MAX_FILE_BYTES;
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a secret is at most {limit} bytes"),
            ));
        }
        Ok(Self::from(text.trim()))
    }

    /// Returns the secret text. Callers must not print it, log it or put it into an error.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(Zeroizing::new(text))
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self::from(text.to_owned())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[redacted]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_trimmed_and_bounded() {
        assert_eq!(
            Secret::read_from(&b" token\r\n"[..]).unwrap().expose(),
            "token"
        );
        assert!(Secret::read_from(&b"\xff"[..]).is_err());
        let long = vec![b'x'; 64 * 1024 + 1];
        assert!(Secret::read_from(&long[..]).is_err());
        assert!(Secret::read_from(&long[1..]).is_ok());
    }
}
