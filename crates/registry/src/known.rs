//! Known-hosts file for environment keys (trust on first use).
//!
//! The file has one environment per line: `registry://HOST/ENVIRONMENT FINGERPRINT`. Only its owner
//! may write it: a user with write access could impersonate any environment.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::calls::RegistryUrl;
use exec_server_relay::keys::Fingerprint;
use exec_server_transport::private_file::{directory_of, make_directory, open_lock, write_new};

use crate::error::KnownEnvironmentsError;

/// Maximum number of bytes read: 16 MiB, enough for a hundred thousand environments.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// File of known environment keys; it may not exist yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownEnvironments {
    path: PathBuf,
}

type KnownResult<T, E = KnownEnvironmentsError> = Result<T, E>;

impl KnownEnvironments {
    /// Uses the file at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The known key of an environment.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, or is writable by other users.
    pub fn lookup(&self, url: &RegistryUrl) -> KnownResult<Option<Fingerprint>> {
        Ok(find(&self.read()?, url))
    }

    /// All known environments and their keys, in the order of the file.
    ///
    /// # Errors
    ///
    /// Same as [`KnownEnvironments::lookup`].
    pub fn list(&self) -> KnownResult<Vec<(RegistryUrl, Fingerprint)>> {
        self.read()
    }

    /// Adds a key unless the environment has one. Returns the key that is then known.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or written.
    pub fn add(&self, url: &RegistryUrl, key: Fingerprint) -> KnownResult<Fingerprint> {
        let _locked = self.lock()?;
        let mut known = self.read()?;
        if let Some(before) = find(&known, url) {
            return Ok(before);
        }
        known.push((url.clone(), key));
        self.write(&known)?;
        Ok(key)
    }

    /// Sets the key of an environment. Returns the previous key.
    ///
    /// # Errors
    ///
    /// Same as [`KnownEnvironments::add`].
    pub fn trust(&self, url: &RegistryUrl, key: Fingerprint) -> KnownResult<Option<Fingerprint>> {
        let _locked = self.lock()?;
        let mut known = self.read()?;
        let before = find(&known, url);
        known.retain(|(other, _)| other != url);
        known.push((url.clone(), key));
        self.write(&known)?;
        Ok(before)
    }

    /// Removes an environment. Returns its key.
    ///
    /// # Errors
    ///
    /// Same as [`KnownEnvironments::add`].
    pub fn forget(&self, url: &RegistryUrl) -> KnownResult<Option<Fingerprint>> {
        let _locked = self.lock()?;
        let mut known = self.read()?;
        let before = find(&known, url);
        if before.is_some() {
            known.retain(|(other, _)| other != url);
            self.write(&known)?;
        }
        Ok(before)
    }

    fn failed(&self, action: &'static str) -> impl Fn(io::Error) -> KnownEnvironmentsError {
        move |source| KnownEnvironmentsError::Io {
            action,
            path: self.path.clone(),
            source,
        }
    }

    fn read(&self) -> KnownResult<Vec<(RegistryUrl, Fingerprint)>> {
        let failed = self.failed("read");
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mode = file.metadata().map_err(&failed)?.mode() & 0o7777;
        if mode & 0o022 != 0 {
            return Err(KnownEnvironmentsError::Permissions {
                path: self.path.clone(),
                mode,
            });
        }
        let mut text = String::new();
        file.take(MAX_FILE_BYTES)
            .read_to_string(&mut text)
            .map_err(&failed)?;
        let mut known = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let entry = line
                .rsplit_once(' ')
                .and_then(|(url, key)| Some((url.trim().parse().ok()?, key.parse().ok()?)));
            known.push(entry.ok_or_else(|| KnownEnvironmentsError::Malformed {
                path: self.path.clone(),
                line: number + 1,
            })?);
        }
        Ok(known)
    }

    /// Locks the file against concurrent changes by other processes, until the result is dropped.
    fn lock(&self) -> KnownResult<File> {
        let failed = self.failed("write");
        let directory = directory_of(&self.path);
        make_directory(directory).map_err(&failed)?;
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(".lock");
        let lock = open_lock(&directory.join(name)).map_err(&failed)?;
        lock.lock().map_err(failed)?;
        Ok(lock)
    }

    fn write(&self, known: &[(RegistryUrl, Fingerprint)]) -> KnownResult<()> {
        let failed = self.failed("write");
        let mut text = String::new();
        for (url, key) in known {
            text.push_str(&format!("{url} {key}\n"));
        }
        let aside = directory_of(&self.path).join(format!(".known-{}", uuid::Uuid::new_v4()));
        let written =
            write_new(&aside, text.as_bytes()).and_then(|()| fs::rename(&aside, &self.path));
        if written.is_err() {
            let _ = fs::remove_file(&aside);
        }
        written.map_err(failed)
    }
}

fn find(known: &[(RegistryUrl, Fingerprint)], url: &RegistryUrl) -> Option<Fingerprint> {
    known
        .iter()
        .find(|(other, _)| other == url)
        .map(|(_, key)| *key)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn key(digit: char) -> Fingerprint {
        digit.to_string().repeat(64).parse().unwrap()
    }

    fn url(text: &str) -> RegistryUrl {
        text.parse().unwrap()
    }

    #[test]
    fn add_keeps_first_key_until_trust_replaces_it() {
        let directory = tempfile::tempdir().unwrap();
        let known = KnownEnvironments::new(directory.path().join("a/b/known"));
        let (one, two) = (url("registry://h/e"), url("registry://h/f"));
        assert_eq!(known.lookup(&one).unwrap(), None);
        assert_eq!(known.add(&one, key('1')).unwrap(), key('1'));
        assert_eq!(known.add(&one, key('2')).unwrap(), key('1'));
        assert_eq!(known.add(&two, key('2')).unwrap(), key('2'));
        assert_eq!(known.lookup(&one).unwrap(), Some(key('1')));
        assert_eq!(known.trust(&one, key('3')).unwrap(), Some(key('1')));
        assert_eq!(known.lookup(&one).unwrap(), Some(key('3')));
        assert_eq!(known.forget(&one).unwrap(), Some(key('3')));
        assert_eq!(known.list().unwrap(), [(two, key('2'))]);
        let mode = fs::metadata(known.path()).unwrap().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }

    #[test]
    fn concurrent_adds_keep_every_key() {
        let directory = tempfile::tempdir().unwrap();
        let known = KnownEnvironments::new(directory.path().join("known"));
        std::thread::scope(|scope| {
            for n in 0..8 {
                let known = &known;
                scope.spawn(move || {
                    known
                        .add(&url(&format!("registry://h/e{n}")), key('1'))
                        .unwrap()
                });
            }
        });
        assert_eq!(known.list().unwrap().len(), 8);
    }

    #[test]
    fn lookup_rejects_writable_by_others_and_malformed_lines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("known");
        let known = KnownEnvironments::new(&path);
        let good = format!("# keys\n\nregistry://h/e {}\n", key('1'));
        fs::write(&path, &good).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(known.list().unwrap().len(), 1);
        for mode in [0o620, 0o602] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = known
                .lookup(&url("registry://h/e"))
                .unwrap_err()
                .to_string();
            assert!(error.contains(&format!("{mode:04o}")), "{error}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, format!("{good}registry://h/f 12\n")).unwrap();
        let error = known
            .lookup(&url("registry://h/e"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("line 4"), "{error}");
    }
}
