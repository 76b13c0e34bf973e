//! Identity file: the long-term keys of an executor or a harness on disk.
//!
//! Reads, creates and checks the file. A key file that other users could read is refused, because a
//! copy of the key is enough to impersonate its owner.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use base64_turbo::STANDARD;
use exec_server_relay::noise::{SEED_BYTES, StaticKeys};
use rustix::process::geteuid;
use zeroize::Zeroizing;

use exec_server_transport::private_file::{directory_of, make_directory, write_new};

/// Prefix of the file content.
const MARK: &str = "exec-server-identity-v1 ";

/// Maximum file size that is read, in bytes; a valid file has 153.
const MAX_FILE_BYTES: u64 = 4096;

/// Reason why the keys cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// The file cannot be read or written.
    #[error("cannot {action} the identity file {}: {source}", path.display())]
    Io {
        /// Action that failed.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Other users could read the file.
    #[error(
        "the identity file {} has mode {mode:04o}: other users could have read it; delete it to get a new key, or `chmod 600` it if they did not",
        path.display()
    )]
    Permissions {
        /// Path of the file.
        path: PathBuf,
        /// Permission bits of the file.
        mode: u32,
    },
    /// The file belongs to another user.
    #[error("the identity file {} belongs to user {owner}, not to the user of this process", path.display())]
    Owner {
        /// Path of the file.
        path: PathBuf,
        /// User id of the owner.
        owner: u32,
    },
    /// The file is not an identity file. The error does not quote its content.
    #[error("{} is not an identity file", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
    },
}

/// Generates new keys.
pub fn generate() -> StaticKeys {
    StaticKeys::generate(&mut |out: &mut [u8]| {
        getrandom::fill(out).expect("the system has randomness");
    })
}

/// Loads the keys from a file; if the file does not exist, generates keys and writes them.
///
/// Processes that create the file at the same time all return the same keys.
///
/// # Errors
///
/// If another user owns or could read the file, it is not an identity file, or it cannot be
/// created.
pub fn load_or_create(path: &Path) -> Result<StaticKeys, IdentityError> {
    match load(path) {
        Err(IdentityError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
        outcome => return outcome,
    }
    let failed = |source| IdentityError::Io {
        action: "write",
        path: path.to_owned(),
        source,
    };
    let directory = directory_of(path);
    make_directory(directory).map_err(failed)?;
    let identity = generate();
    let text = Zeroizing::new(format!(
        "{MARK}{}\n",
        *Zeroizing::new(STANDARD.encode(identity.seed()))
    ));
    let aside = directory.join(format!(".identity-{}", uuid::Uuid::new_v4()));
    let written = write_new(&aside, text.as_bytes())
        // `link` fails if another process has created the file meanwhile; `rename` would replace
        // it.
        .and_then(|()| fs::hard_link(&aside, path));
    let _ = fs::remove_file(&aside);
    match written {
        Ok(()) => Ok(identity),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => load(path),
        Err(error) => Err(failed(error)),
    }
}

fn load(path: &Path) -> Result<StaticKeys, IdentityError> {
    let failed = |source| IdentityError::Io {
        action: "read",
        path: path.to_owned(),
        source,
    };
    let malformed = || IdentityError::Malformed {
        path: path.to_owned(),
    };
    let file = File::open(path).map_err(failed)?;
    // Check the open file: the path may lead to another file by now.
    let meta = file.metadata().map_err(failed)?;
    if !meta.is_file() {
        return Err(malformed());
    }
    if meta.uid() != geteuid().as_raw() {
        return Err(IdentityError::Owner {
            path: path.to_owned(),
            owner: meta.uid(),
        });
    }
    let mode = meta.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(IdentityError::Permissions {
            path: path.to_owned(),
            mode,
        });
    }
    let mut text = Zeroizing::new(String::with_capacity(MAX_FILE_BYTES as usize));
    file.take(MAX_FILE_BYTES)
        .read_to_string(&mut text)
        .map_err(failed)?;
    let seed = text
        .strip_prefix(MARK)
        .and_then(|seed| STANDARD.decode(seed.trim_end()).ok())
        .map(Zeroizing::new);
    let seed: Option<Zeroizing<[u8; SEED_BYTES]>> =
        seed.and_then(|seed| Some(Zeroizing::new(seed.as_slice().try_into().ok()?)));
    Ok(StaticKeys::from_seed(&*seed.ok_or_else(malformed)?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    struct KeyDirectory(PathBuf);

    impl KeyDirectory {
        fn new() -> Self {
            let name = format!("exec-server-identity-{}", uuid::Uuid::new_v4());
            Self(std::env::temp_dir().join(name))
        }
    }

    impl Drop for KeyDirectory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn keys_are_stable_and_the_file_is_private() {
        let directory = KeyDirectory::new();
        let path = directory.0.join("deep/identity");
        let made = load_or_create(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        let again = load_or_create(&path).unwrap();
        assert_eq!(made.public_key(), again.public_key());
        let left = fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "nothing is left beside it");
    }

    #[test]
    fn concurrent_creation_returns_the_same_keys() {
        let directory = KeyDirectory::new();
        let path = directory.0.join("identity");
        let keys: Vec<_> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| load_or_create(&path).unwrap().public_key().clone()))
                .collect();
            starts
                .into_iter()
                .map(|start| start.join().unwrap())
                .collect()
        });
        assert!(keys.windows(2).all(|pair| pair[0] == pair[1]));
    }

    #[test]
    fn identity_files_that_others_can_read_or_that_are_malformed_are_rejected() {
        let directory = KeyDirectory::new();
        let path = directory.0.join("identity");
        load_or_create(&path).unwrap();
        for mode in [0o640, 0o604, 0o660] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = load_or_create(&path).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(path.to_str().unwrap()), "{text}");
            assert!(text.contains(&format!("{mode:04o}")), "{text}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let good = fs::read_to_string(&path).unwrap();
        let short = format!("{}\n", &good[..good.len() - 10]);
        for bad in ["", "sekrit", &short, &good[8..], MARK] {
            fs::write(&path, bad).unwrap();
            let error = load_or_create(&path).unwrap_err();
            assert!(matches!(error, IdentityError::Malformed { .. }), "{error}");
            assert!(!error.to_string().contains("sekrit"), "{error}");
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(matches!(
            load_or_create(&path),
            Err(IdentityError::Malformed { .. })
        ));
    }
}
