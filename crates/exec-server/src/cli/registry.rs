//! `--url registry://…`: environments that are reached through a registry.

use anyhow::Context as _;
use exec_server_client::environment::connect::Connect;
use exec_server_client::registry::{
    KnownEnvironments, Proxies, RegistryAuth, RegistryConnectArgs, RegistryConnectError,
    RegistryTarget, RegistryUrl, Trust,
};
use exec_server_client::{ExecServerClient, RemoteExecServerConnectArgs, Reply};
use exec_server_transport::identity;
use exec_server_transport::registry::RegistryError;

use super::access;
use super::args::ServerArgs;
use super::settings::{STATE_VARIABLE, state_directory, variable};

/// An environment that tells whose key it believes from now on.
#[derive(Debug)]
pub(super) struct Target {
    inner: RegistryTarget,
    url: RegistryUrl,
    known: KnownEnvironments,
}

/// How to reach an environment by its URL, as whoever the arguments say.
pub(super) fn target(url: &str, server: &ServerArgs) -> anyhow::Result<Target> {
    let url: RegistryUrl = url.parse()?;
    let known = known()?;
    Ok(Target {
        inner: RegistryTarget::new(args(&url, server, &known)?)?,
        url,
        known,
    })
}

impl Connect for Target {
    fn connect(&self) -> Reply<'_, ExecServerClient> {
        Box::pin(async {
            let lookup = || {
                let known = self.known.lookup(&self.url);
                known.map_err(RegistryConnectError::from)
            };
            let before = lookup()?;
            let client = self.inner.connect().await?;
            if let (None, Some(key)) = (before, lookup()?) {
                eprintln!(
                    "exec-server: first use of {}; from now on its key is {key}",
                    self.url
                );
            }
            Ok(client)
        })
    }

    fn target(&self) -> String {
        self.inner.target()
    }
}

/// What there is to say about reaching an environment.
pub(super) fn args(
    url: &RegistryUrl,
    server: &ServerArgs,
    known: &KnownEnvironments,
) -> anyhow::Result<RegistryConnectArgs> {
    let name = format!("exec-server {}", env!("CARGO_PKG_VERSION"));
    // Tokens and certificates are given as for any server.
    let mut given = RemoteExecServerConnectArgs::new(url.to_string(), name.as_str());
    access::introduce(server, &mut given)?;
    let auth = match given.bearer_token {
        Some(token) => RegistryAuth::bearer(token),
        None => RegistryAuth::Open,
    };
    let mut args = RegistryConnectArgs::of(url, auth, name);
    args.registry.tls = given.tls;
    args.registry.proxies = Proxies::of_variables(variable);
    // Whoever writes `registry+http:` has been told.
    args.registry.danger_plain_http = true;
    args.identity = identity::load_or_create(&state()?.join("harness.identity"))?;
    args.trust = Trust::FirstUse(known.clone());
    Ok(args)
}

/// Whom this user believes.
pub(super) fn known() -> anyhow::Result<KnownEnvironments> {
    Ok(KnownEnvironments::new(state()?.join("known_environments")))
}

fn state() -> anyhow::Result<std::path::PathBuf> {
    state_directory().with_context(|| format!("no place for keys: set HOME or {STATE_VARIABLE}"))
}

/// What to do about an environment that cannot be reached.
pub(super) fn hint(error: &RegistryConnectError) -> Option<String> {
    match error {
        RegistryConnectError::KeyChanged { .. } => Some(
            "if the machine was set up anew, `exec-server env trust URL` believes its new key; if \
             not, somebody else may answer in its place"
                .to_owned(),
        ),
        RegistryConnectError::Registry(RegistryError::Auth { .. }) => {
            Some("pass --token-file FILE or set EXEC_SERVER_TOKEN_FILE".to_owned())
        }
        RegistryConnectError::Registry(error) if error.is_offline() => {
            Some("no machine serves this environment now; `exec-server --remote` does".to_owned())
        }
        _ => None,
    }
}
