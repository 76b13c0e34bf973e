//! Files and directories that only this user can use: keys, known keys, locks.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

/// The directory of a file; the working directory for a bare name.
pub fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes a directory and those above it, with mode 0700, unless they exist.
///
/// # Errors
///
/// When one of them cannot be made.
pub fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Writes a file that does not exist yet, with mode 0600, and waits until it is on the disk.
///
/// # Errors
///
/// When the file exists, or cannot be written.
pub fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Opens a file to lock it, made with mode 0600 if it does not exist. Its content stays.
///
/// # Errors
///
/// When it cannot be opened.
pub fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn what_is_made_is_private_and_not_replaced() {
        let place =
            std::env::temp_dir().join(format!("exec-server-private-{}", std::process::id()));
        let file = place.join("inner/file");
        assert_eq!(directory_of(Path::new("name")), Path::new("."));
        make_directory(directory_of(&file)).unwrap();
        make_directory(directory_of(&file)).unwrap();
        write_new(&file, b"content").unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        let found = [mode(&place), mode(directory_of(&file)), mode(&file)];
        let again = write_new(&file, b"other").unwrap_err().kind();
        open_lock(&file).unwrap().lock().unwrap();
        let content = std::fs::read(&file).unwrap();
        std::fs::remove_dir_all(&place).unwrap();
        assert_eq!(found, [0o700, 0o700, 0o600]);
        assert_eq!(
            (again, &content[..]),
            (io::ErrorKind::AlreadyExists, &b"content"[..])
        );
    }
}
