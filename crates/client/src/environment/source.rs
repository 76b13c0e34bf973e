//! Resolution order of environment definitions: variables, file, defaults.
//!
//! Does not read process variables or the home directory itself: the caller supplies both. Opens no
//! connection.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use exec_server_transport::Secret;
use exec_server_transport::tls::PinParseError;
#[cfg(feature = "registry")]
use exec_server_transport::tls::TlsClientOptions;
use futures_util::future::BoxFuture;

use super::connect::{AddressError, ENVIRONMENT_CLIENT_NAME, UrlTarget, from_url};
use super::file::{
    DefaultEnvironment, EnvironmentEntry, EnvironmentsFile, EnvironmentsFileError, FILE_NAME,
};
use super::id::{LOCAL, NONE, REMOTE};
#[cfg(feature = "registry")]
use super::registry::RegistryEntry;
#[cfg(feature = "registry")]
use crate::options::ExecServerClientConnectOptions;
use crate::options::RemoteExecServerConnectArgs;
#[cfg(feature = "registry")]
use crate::registry::{RegistryAuth, RegistryUrl, RegistryUrlParseError};

/// Variable with the settings directory of this program.
pub const HOME_VARIABLE: &str = "EXEC_SERVER_HOME";
/// Variable with the URL of the server, or `none`.
pub const URL_VARIABLE: &str = "EXEC_SERVER_URL";
const TOKEN_VARIABLE: &str = "EXEC_SERVER_TOKEN";
const TOKEN_FILE_VARIABLE: &str = "EXEC_SERVER_TOKEN_FILE";
const TLS_PIN_VARIABLE: &str = "EXEC_SERVER_TLS_PIN";
const TLS_CA_VARIABLE: &str = "EXEC_SERVER_TLS_CA";
/// Variables that Codex uses for its directory and its server.
const CODEX_HOME_VARIABLE: &str = "CODEX_HOME";
const CODEX_URL_VARIABLE: &str = "CODEX_EXEC_SERVER_URL";

/// Source of environment definitions.
pub trait EnvironmentProvider: Send + Sync + fmt::Debug {
    /// The current environment definitions. Opens no connection.
    fn snapshot(&self) -> BoxFuture<'_, Result<EnvironmentList, EnvironmentSourceError>>;
}

/// Environment definitions, before any connection is opened.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct EnvironmentList {
    /// Environments other than this machine, in order.
    pub environments: Vec<EnvironmentEntry>,
    /// Id of the default environment.
    pub default: Option<String>,
    /// Whether this machine is one of them.
    pub include_local: bool,
    /// Settings that were found but not used, as readable text.
    pub warnings: Vec<String>,
}

impl EnvironmentList {
    /// Definitions with only this machine.
    pub fn local() -> Self {
        Self {
            default: Some(LOCAL.to_owned()),
            include_local: true,
            ..Self::default()
        }
    }

    /// One environment, which is the default.
    pub fn only(entry: EnvironmentEntry) -> Self {
        Self {
            default: Some(entry.id.clone()),
            environments: vec![entry],
            ..Self::default()
        }
    }

    /// The definition with this id; this machine has none.
    pub fn entry(&self, id: &str) -> Option<&EnvironmentEntry> {
        self.environments.iter().find(|entry| entry.id == id)
    }

    /// All ids in order, this machine's first.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        let local = self.include_local.then_some(LOCAL);
        local
            .into_iter()
            .chain(self.environments.iter().map(|entry| entry.id.as_str()))
    }
}

impl From<EnvironmentsFile> for EnvironmentList {
    fn from(file: EnvironmentsFile) -> Self {
        let default = match file.default {
            DefaultEnvironment::Id(id) => Some(id),
            DefaultEnvironment::Disabled => None,
            DefaultEnvironment::Unset => file.include_local.then(|| LOCAL.to_owned()),
        };
        Self {
            environments: file.environments,
            default,
            include_local: file.include_local,
            warnings: Vec::new(),
        }
    }
}

/// Provider of a fixed list.
impl EnvironmentProvider for EnvironmentList {
    fn snapshot(&self) -> BoxFuture<'_, Result<EnvironmentList, EnvironmentSourceError>> {
        Box::pin(async { Ok(self.clone()) })
    }
}

/// Error of loading environment definitions.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentSourceError {
    /// The file is invalid or cannot be read.
    #[error(transparent)]
    File(#[from] EnvironmentsFileError),
    /// A variable does not contain a valid URL.
    #[error("{variable}: {source}")]
    Address {
        /// The variable.
        variable: &'static str,
        /// The reason why the value is rejected.
        source: AddressError,
    },
    /// Only some of the variables that define a registry environment are set.
    #[error("EXEC_SERVER_NOISE_{0} is not set, but other EXEC_SERVER_NOISE_ variables are")]
    Incomplete(&'static str),
    /// The registry variables do not define a valid environment.
    #[error("EXEC_SERVER_NOISE_REGISTRY_URL and _ENVIRONMENT_ID: {0}")]
    Registry(String),
    /// A variable does not contain a valid certificate pin.
    #[error("{variable}: {source}")]
    Pin {
        /// The variable.
        variable: &'static str,
        /// The reason why the value is rejected.
        source: PinParseError,
    },
}

/// Environment definitions from variables, and from the file that the variables select.
///
/// | first condition that is true | environments |
/// |---|---|
/// | `EXEC_SERVER_NOISE_REGISTRY_URL`, `…_NOISE_ENVIRONMENT_ID` and `…_NOISE_AUTH_TOKEN` are set | only `remote`, through that registry |
/// | `EXEC_SERVER_URL` is `none` | none |
/// | `EXEC_SERVER_URL` is a URL | `remote`, which is the default, and those of the file if it exists |
/// | `environments.toml` exists | those of the file |
/// | `CODEX_EXEC_SERVER_URL` is `none` | none |
/// | `CODEX_EXEC_SERVER_URL` is a URL | only `remote` |
/// | otherwise | only this machine |
///
/// The file is in `EXEC_SERVER_HOME` if that is set. Otherwise it is in the directory `exec-server`
/// below `XDG_CONFIG_HOME` or `~/.config`; if it does not exist there, in `CODEX_HOME`. The token
/// for `EXEC_SERVER_URL` is in `EXEC_SERVER_TOKEN`, or in the file that `EXEC_SERVER_TOKEN_FILE`
/// names. `EXEC_SERVER_TLS_PIN` and `EXEC_SERVER_TLS_CA` select the certificates to trust. The
/// names of the registry variables, including the optional `…_NOISE_CHATGPT_ACCOUNT_ID`, may begin
/// with `CODEX_`.
///
/// ```
/// use exec_server_client::environment::ConfiguredEnvironments;
///
/// let variables = |name: &str| (name == "EXEC_SERVER_URL").then(|| "ws://127.0.0.1:4600".to_owned());
/// let list = ConfiguredEnvironments::new(variables).load()?;
/// assert_eq!(list.default.as_deref(), Some("remote"));
/// // In a program: `ConfiguredEnvironments::new(|name| std::env::var(name).ok())`.
/// # Ok::<_, exec_server_client::environment::EnvironmentSourceError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ConfiguredEnvironments {
    own_file: Option<PathBuf>,
    codex_file: Option<PathBuf>,
    url: Option<String>,
    codex_url: Option<String>,
    token: Option<Secret>,
    token_file: Option<PathBuf>,
    tls_pin: Option<String>,
    tls_ca: Option<PathBuf>,
    /// Directory for keys.
    state: Option<PathBuf>,
    #[cfg(feature = "registry")]
    noise: NoiseVariables,
}

/// Variables that define a registry environment. Our own names take precedence over those of Codex.
#[cfg(feature = "registry")]
#[derive(Debug, Clone)]
struct NoiseVariables {
    registry_url: Option<String>,
    environment_id: Option<String>,
    token: Option<Secret>,
    account_id: Option<String>,
}

#[cfg(feature = "registry")]
impl NoiseVariables {
    fn new(given: impl Fn(&str) -> Option<String>) -> Self {
        let given = |name: &str| {
            let named = |prefix: &str| given(&format!("{prefix}EXEC_SERVER_NOISE_{name}"));
            let value = named("").or_else(|| named("CODEX_"))?;
            Some(value.trim().to_owned())
        };
        Self {
            registry_url: given("REGISTRY_URL"),
            environment_id: given("ENVIRONMENT_ID"),
            token: given("AUTH_TOKEN").map(Secret::from),
            account_id: given("CHATGPT_ACCOUNT_ID"),
        }
    }

    /// The environment that the variables define. `None` if all are unset; an error if only some
    /// are set.
    fn entry(
        &self,
        state: Option<&Path>,
    ) -> Result<Option<EnvironmentEntry>, EnvironmentSourceError> {
        let (registry_url, environment_id, token) =
            match (&self.registry_url, &self.environment_id, &self.token) {
                (None, None, None) => return Ok(None),
                (Some(url), Some(id), Some(token)) => (url, id, token.clone()),
                (url, id, _) => {
                    let missing = match (url, id) {
                        (None, _) => "REGISTRY_URL",
                        (_, None) => "ENVIRONMENT_ID",
                        _ => "AUTH_TOKEN",
                    };
                    return Err(EnvironmentSourceError::Incomplete(missing));
                }
            };
        let url = RegistryUrl::new(registry_url, environment_id)
            .map_err(|source| EnvironmentSourceError::Registry(source.to_string()))?;
        let account_id = self.account_id.clone();
        let entry = RegistryEntry {
            url,
            auth: RegistryAuth::Bearer { token, account_id },
            tls: TlsClientOptions::default(),
            options: ExecServerClientConnectOptions::new(ENVIRONMENT_CLIENT_NAME),
            state: state.map(Path::to_owned),
        };
        Ok(Some(EnvironmentEntry::new(REMOTE, Arc::new(entry))))
    }
}

impl ConfiguredEnvironments {
    /// Reads the needed values through `variable`.
    pub fn new(variable: impl Fn(&str) -> Option<String>) -> Self {
        let given = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let path = |name: &str| given(name).map(PathBuf::from);
        let directory = path(HOME_VARIABLE).or_else(|| {
            let settings = path("XDG_CONFIG_HOME").filter(|path| path.is_absolute());
            let settings = settings.or_else(|| Some(path("HOME")?.join(".config")));
            settings.map(|settings| settings.join("exec-server"))
        });
        let own_directory = given(HOME_VARIABLE).is_some();
        let codex_home = path(CODEX_HOME_VARIABLE).filter(|_| !own_directory);
        Self {
            own_file: directory.map(|directory| directory.join(FILE_NAME)),
            codex_file: codex_home.map(|directory| directory.join(FILE_NAME)),
            url: given(URL_VARIABLE),
            codex_url: given(CODEX_URL_VARIABLE),
            token: given(TOKEN_VARIABLE).map(|token| Secret::from(token.trim())),
            token_file: path(TOKEN_FILE_VARIABLE),
            tls_pin: given(TLS_PIN_VARIABLE),
            tls_ca: path(TLS_CA_VARIABLE),
            state: path("EXEC_SERVER_STATE_DIR")
                .or_else(|| path("STATE_DIRECTORY"))
                .or_else(|| Some(path("XDG_STATE_HOME")?.join("exec-server")))
                .or_else(|| Some(path("HOME")?.join(".local/state/exec-server"))),
            #[cfg(feature = "registry")]
            noise: NoiseVariables::new(given),
        }
    }

    /// Path of our own `environments.toml`, which may not exist; `None` without a home directory.
    pub fn own_file(&self) -> Option<&Path> {
        self.own_file.as_deref()
    }

    /// Path of the `environments.toml` that is used, if one exists.
    pub fn file(&self) -> Option<&Path> {
        [self.own_file(), self.codex_file.as_deref()]
            .into_iter()
            .flatten()
            .find(|path| path.exists())
    }

    /// Loads the environment definitions.
    ///
    /// # Errors
    ///
    /// When the file or a variable is invalid.
    pub fn load(&self) -> Result<EnvironmentList, EnvironmentSourceError> {
        #[cfg(feature = "registry")]
        if let Some(entry) = self.noise.entry(self.state.as_deref())? {
            return Ok(EnvironmentList::only(entry));
        }
        let file = match self.file() {
            Some(path) => {
                let state = self.state.as_deref().or(path.parent());
                Some((path, EnvironmentsFile::read_with_state(path, state)?))
            }
            None => None,
        };
        if let Some(url) = &self.url {
            if is_none(url) {
                return Ok(EnvironmentList::default());
            }
            let entry = self.named_by_variable(url.trim())?;
            let Some((_, file)) = file else {
                return Ok(EnvironmentList::only(entry));
            };
            let mut list = EnvironmentList::from(file);
            // A variable takes precedence over the file, as for all settings.
            list.default = Some(entry.id.clone());
            match list
                .environments
                .iter_mut()
                .find(|other| other.id == entry.id)
            {
                Some(other) => *other = entry,
                None => list.environments.push(entry),
            }
            return Ok(list);
        }
        if let Some((path, file)) = file {
            let mut list = EnvironmentList::from(file);
            if self.codex_url.is_some() {
                list.warnings.push(format!(
                    "{CODEX_URL_VARIABLE} is not used, because {} exists",
                    path.display()
                ));
            }
            return Ok(list);
        }
        match &self.codex_url {
            None => Ok(EnvironmentList::local()),
            Some(url) if is_none(url) => Ok(EnvironmentList::default()),
            Some(url) => {
                let args = RemoteExecServerConnectArgs::new("", ENVIRONMENT_CLIENT_NAME);
                let connect = from_url(url.trim(), args).map_err(|source| {
                    let variable = CODEX_URL_VARIABLE;
                    EnvironmentSourceError::Address { variable, source }
                })?;
                Ok(EnvironmentList::only(EnvironmentEntry::new(
                    REMOTE, connect,
                )))
            }
        }
    }

    /// The environment that `EXEC_SERVER_URL` and its related variables define.
    fn named_by_variable(&self, url: &str) -> Result<EnvironmentEntry, EnvironmentSourceError> {
        let mut args = RemoteExecServerConnectArgs::new("", ENVIRONMENT_CLIENT_NAME);
        args.bearer_token.clone_from(&self.token);
        args.tls.ca_file.clone_from(&self.tls_ca);
        if let Some(pin) = &self.tls_pin {
            let pin = pin.trim().parse().map_err(|source| {
                let variable = TLS_PIN_VARIABLE;
                EnvironmentSourceError::Pin { variable, source }
            })?;
            args.tls.pin = Some(pin);
        }
        let wrong = |source| EnvironmentSourceError::Address {
            variable: URL_VARIABLE,
            source,
        };
        #[cfg(feature = "registry")]
        if RegistryUrl::matches(url) {
            let parsed = url.parse().map_err(|error: RegistryUrlParseError| {
                wrong(AddressError::Invalid {
                    url: url.to_owned(),
                    reason: error.to_string(),
                })
            })?;
            let entry = RegistryEntry {
                url: parsed,
                auth: match (&self.token_file, args.bearer_token) {
                    (Some(path), _) => RegistryAuth::BearerFile(path.clone()),
                    (None, Some(token)) => RegistryAuth::bearer(token),
                    (None, None) => RegistryAuth::Open,
                },
                tls: args.tls,
                options: args.options,
                state: self.state.clone(),
            };
            return Ok(EnvironmentEntry::new(REMOTE, Arc::new(entry)));
        }
        let connect = match &self.token_file {
            Some(path) if UrlTarget::new(url, args.clone()).is_ok() => {
                let mut target = UrlTarget::new(url, args).map_err(wrong)?;
                target.token_file = Some(path.clone());
                Arc::new(target)
            }
            _ => from_url(url, args).map_err(wrong)?,
        };
        Ok(EnvironmentEntry::new(REMOTE, connect))
    }
}

impl EnvironmentProvider for ConfiguredEnvironments {
    fn snapshot(&self) -> BoxFuture<'_, Result<EnvironmentList, EnvironmentSourceError>> {
        Box::pin(async { self.load() })
    }
}

fn is_none(url: &str) -> bool {
    url.trim().eq_ignore_ascii_case(NONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct HomeFixture(tempfile::TempDir);

    impl HomeFixture {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn write(&self, directory: &str, text: &str) {
            let directory = self.0.path().join(directory);
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join(FILE_NAME), text).unwrap();
        }

        fn at(&self, directory: &str) -> String {
            self.0.path().join(directory).to_str().unwrap().to_owned()
        }

        fn load(
            &self,
            variables: &[(&str, &str)],
        ) -> Result<EnvironmentList, EnvironmentSourceError> {
            ConfiguredEnvironments::new(|name| {
                let given = variables.iter().find(|(known, _)| *known == name);
                match given {
                    Some((_, value)) => Some((*value).to_owned()),
                    None => (name == "HOME").then(|| self.at("")),
                }
            })
            .load()
        }

        fn ids(&self, variables: &[(&str, &str)]) -> (Vec<String>, Option<String>) {
            let list = self.load(variables).unwrap();
            (list.ids().map(str::to_owned).collect(), list.default)
        }
    }

    fn ids(ids: &[&str], default: Option<&str>) -> (Vec<String>, Option<String>) {
        (
            ids.iter().map(|id| (*id).to_owned()).collect(),
            default.map(str::to_owned),
        )
    }

    #[test]
    fn load_with_url_variables_only_selects_one_environment() {
        let home = HomeFixture::new();
        assert_eq!(home.ids(&[]), ids(&["local"], Some("local")));
        for (own, codex) in [("EXEC_SERVER_URL", true), ("CODEX_EXEC_SERVER_URL", false)] {
            assert_eq!(home.ids(&[(own, " ")]), ids(&["local"], Some("local")));
            assert_eq!(home.ids(&[(own, " NONE ")]), ids(&[], None));
            let named = home.load(&[(own, " ws://h:1 ")]).unwrap();
            assert!(!named.include_local);
            assert_eq!(named.environments[0].connect.target(), "ws://h:1");
            assert_eq!(named.default.as_deref(), Some("remote"), "{codex}");
            let error = home.load(&[(own, "http://h")]).unwrap_err().to_string();
            assert!(error.contains(own) && error.contains("http://h"), "{error}");
        }
        let both = [
            ("EXEC_SERVER_URL", "ws://a:1"),
            ("CODEX_EXEC_SERVER_URL", "ws://b:1"),
        ];
        let list = home.load(&both).unwrap();
        assert_eq!(list.environments[0].connect.target(), "ws://a:1");
    }

    #[test]
    fn token_and_pin_apply_only_to_own_url_variable() {
        let home = HomeFixture::new();
        let shown = |variables: &[(&str, &str)]| {
            format!("{:?}", home.load(variables).unwrap().environments)
        };
        let token = ("EXEC_SERVER_TOKEN", "secret");
        let own = shown(&[("EXEC_SERVER_URL", "ws://h:1"), token]);
        assert!(
            own.contains("Some([redacted])") && !own.contains("secret"),
            "{own}"
        );
        let codex = shown(&[("CODEX_EXEC_SERVER_URL", "ws://h:1"), token]);
        assert!(codex.contains("bearer_token: None"), "{codex}");
        let file = ("EXEC_SERVER_TOKEN_FILE", "/run/token");
        assert!(shown(&[("EXEC_SERVER_URL", "ws://h:1"), file]).contains("/run/token"));
        let pin = ("EXEC_SERVER_TLS_PIN", "nonsense");
        let error = home
            .load(&[("EXEC_SERVER_URL", "wss://h:1"), pin])
            .unwrap_err();
        assert!(
            error.to_string().starts_with("EXEC_SERVER_TLS_PIN: "),
            "{error}"
        );
    }

    #[cfg(feature = "registry")]
    #[test]
    fn registry_variables_take_precedence_and_must_be_complete() {
        let home = HomeFixture::new();
        home.write(".config/exec-server", "colour = 1");
        let names = [
            "REGISTRY_URL",
            "ENVIRONMENT_ID",
            "AUTH_TOKEN",
            "CHATGPT_ACCOUNT_ID",
        ];
        let values = ["https://meet.example", "build-7", "s3cret", "account"];
        for prefix in ["", "CODEX_"] {
            let names = names.map(|name| format!("{prefix}EXEC_SERVER_NOISE_{name}"));
            let all: Vec<_> = names.iter().map(String::as_str).zip(values).collect();
            for given in [&all[..], &all[..3]] {
                let list = home.load(given).unwrap();
                assert_eq!(list.ids().collect::<Vec<_>>(), ["remote"]);
                assert_eq!(list.default.as_deref(), Some("remote"));
                let target = list.environments[0].connect.target();
                assert_eq!(target, "registry://meet.example/build-7");
                let shown = format!("{:?}", list.environments[0]);
                assert!(!shown.contains("s3cret"), "{shown}");
                assert_eq!(shown.contains("account\""), given.len() == 4, "{shown}");
            }
            for missing in 0..3 {
                let mut given = all.clone();
                given[missing].1 = " ";
                let error = home.load(&given).unwrap_err().to_string();
                let name = names[missing].trim_start_matches("CODEX_");
                assert!(error.contains(name), "{error}");
            }
            let mut given = all.clone();
            given[0].1 = "ftp://meet.example";
            assert!(
                home.load(&given)
                    .unwrap_err()
                    .to_string()
                    .contains("REGISTRY_URL")
            );
        }
        // An account id alone does not define an environment.
        assert!(
            home.load(&[("EXEC_SERVER_NOISE_CHATGPT_ACCOUNT_ID", "a")])
                .is_err()
        );
        let home = HomeFixture::new();
        let list = home
            .load(&[("EXEC_SERVER_URL", "registry://meet.example/x")])
            .unwrap();
        assert_eq!(
            list.environments[0].connect.target(),
            "registry://meet.example/x"
        );
        let bad = home.load(&[("EXEC_SERVER_URL", "registry://meet.example")]);
        assert!(bad.unwrap_err().to_string().contains("EXEC_SERVER_URL"));
    }

    #[test]
    fn file_overrides_codex_url_and_own_url_overrides_file() {
        let home = HomeFixture::new();
        home.write(
            ".config/exec-server",
            "[[environments]]\nid = 'worker'\nurl = 'ws://w:1'",
        );
        assert_eq!(home.ids(&[]), ids(&["local", "worker"], Some("local")));
        let codex = home.load(&[("CODEX_EXEC_SERVER_URL", "ws://b:1")]).unwrap();
        assert_eq!(codex.ids().collect::<Vec<_>>(), ["local", "worker"]);
        assert!(codex.warnings[0].contains("CODEX_EXEC_SERVER_URL is not used"));
        assert_eq!(
            home.ids(&[("EXEC_SERVER_URL", "ws://b:1")]),
            ids(&["local", "worker", "remote"], Some("remote"))
        );
        assert_eq!(home.ids(&[("EXEC_SERVER_URL", "none")]), ids(&[], None));
        home.write(".config/exec-server", "colour = 1");
        let error = home.load(&[]).unwrap_err().to_string();
        assert!(error.contains("environments.toml:1: `colour`"), "{error}");
    }

    #[test]
    fn file_lookup_prefers_explicit_home_then_xdg_then_codex() {
        let home = HomeFixture::new();
        let entry = |id: &str| format!("[[environments]]\nid = '{id}'\nurl = 'ws://w:1'");
        let codex = home.at("codex");
        let own = home.at("own");
        let xdg = home.at("xdg");
        home.write("codex", &entry("codex"));
        let found = |variables: &[(&str, &str)]| {
            let list = home.load(variables).unwrap();
            list.environments.into_iter().map(|entry| entry.id).next()
        };
        assert_eq!(found(&[("CODEX_HOME", &codex)]).as_deref(), Some("codex"));
        let both = [
            ("CODEX_HOME", codex.as_str()),
            ("XDG_CONFIG_HOME", xdg.as_str()),
        ];
        assert_eq!(found(&both).as_deref(), Some("codex"));
        home.write("xdg/exec-server", &entry("xdg"));
        assert_eq!(found(&both).as_deref(), Some("xdg"));
        // An explicit `EXEC_SERVER_HOME` disables the other directories.
        let named = [
            ("CODEX_HOME", codex.as_str()),
            ("EXEC_SERVER_HOME", own.as_str()),
        ];
        assert_eq!(found(&named), None);
        home.write("own", &entry("own"));
        assert_eq!(found(&named).as_deref(), Some("own"));
    }
}
