//! Files and directories that only the current user can access: keys, known keys, locks.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

/// Returns the directory of a file; the working directory for a bare name.
pub fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Creates a directory and its missing parents with mode 0700.
///
/// # Errors
///
/// If a directory cannot be created.
pub fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Creates a new file with mode 0600, writes its content and syncs it to disk.
///
/// # Errors
///
/// If the file exists or cannot be written.
pub fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Opens a lock file; creates it with mode 0600 if it does not exist. Keeps the content.
///
/// # Errors
///
/// If the file cannot be opened.
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
    fn created_files_are_private_and_never_replaced() {
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
