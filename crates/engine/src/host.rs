//! Host information: account, login shell, machine name and id.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use exec_server_protocol::PathUri;
use exec_server_protocol::environment::{EnvironmentInfo, Shell};

/// Entry of a user in the password database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserAccount {
    /// The home directory.
    pub home: PathBuf,
    /// The login shell.
    pub shell: PathBuf,
}

/// The account of the user that runs this program, if it has an entry.
pub fn account() -> Option<UserAccount> {
    find_account(
        &fs::read_to_string("/etc/passwd").ok()?,
        rustix::process::getuid().as_raw(),
    )
}

fn find_account(passwd: &str, uid: u32) -> Option<UserAccount> {
    passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [_, _, id, _, _, home, shell] = fields[..] else {
            return None;
        };
        (id.parse() == Ok(uid)).then(|| UserAccount {
            home: home.into(),
            shell: shell.into(),
        })
    })
}

/// The shell to report: the user's own if its kind is known, else the first that exists.
pub fn shell(account: Option<&UserAccount>) -> (String, PathBuf) {
    const KNOWN: [&str; 3] = ["zsh", "bash", "sh"];
    let kind = |path: &Path| -> Option<String> {
        let name = path.file_name()?.to_str()?;
        (KNOWN.contains(&name) && path.exists()).then(|| name.to_owned())
    };
    let own = account.map(|account| account.shell.clone());
    let common = ["/bin/bash", "/usr/bin/bash", "/bin/zsh", "/usr/bin/zsh"].map(PathBuf::from);
    own.into_iter()
        .chain(common)
        .find_map(|path| Some((kind(&path)?, path)))
        .unwrap_or_else(|| ("sh".to_owned(), PathBuf::from("/bin/sh")))
}

/// A stable identifier of this machine, if it has one.
pub fn machine_id() -> Option<String> {
    [
        "/etc/machine-id",
        "/var/lib/dbus/machine-id",
        "/proc/sys/kernel/random/boot_id",
    ]
    .iter()
    .find_map(|path| fs::read_to_string(path).ok())
    .map(|text| text.trim().to_owned())
    .filter(|text| !text.is_empty())
}

/// The host name.
pub fn name() -> Option<String> {
    let system = rustix::system::uname();
    let name = system.nodename().to_string_lossy();
    (!name.is_empty()).then(|| name.into_owned())
}

/// The user's home directory: `HOME` of the given environment, else that of the account.
pub fn home(env: &BTreeMap<String, String>, account: Option<&UserAccount>) -> Option<PathBuf> {
    let from_env = env
        .get("HOME")
        .map(PathBuf::from)
        .filter(|home| home.is_absolute());
    from_env.or_else(|| account.map(|account| account.home.clone()))
}

/// Host information for clients, without the fields that only a server knows about itself.
pub fn describe(env: &BTreeMap<String, String>) -> EnvironmentInfo {
    let account = account();
    let (name, path) = shell(account.as_ref());
    let uri = |path: &Path| PathUri::from_native(path).ok();
    let tmpdir = env.get("TMPDIR").filter(|dir| !dir.is_empty());
    EnvironmentInfo {
        shell: Shell {
            name,
            path: path.to_string_lossy().into_owned(),
        },
        executor_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        provider_id: None,
        cwd: None,
        user_home_dir: home(env, account.as_ref()).as_deref().and_then(uri),
        platform_os: Some(std::env::consts::OS.to_owned()),
        prepend_path_dirs: Vec::new(),
        temporary_directories: tmpdir
            .and_then(|dir| uri(Path::new(dir)))
            .into_iter()
            .collect(),
        temp_dir: uri(Path::new(tmpdir.map_or("/tmp", String::as_str))),
        capabilities: BTreeMap::default(),
        extensions: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_is_read_from_the_password_database() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\nbad line\nu:x:1000:1000::/home/u:/bin/zsh\n";
        let account = find_account(passwd, 1000).unwrap();
        assert_eq!(account.home, Path::new("/home/u"));
        assert_eq!(find_account(passwd, 7), None);
        let odd = UserAccount {
            home: "/".into(),
            shell: "/usr/sbin/nologin".into(),
        };
        assert_ne!(shell(Some(&odd)).1, odd.shell);
    }
}
