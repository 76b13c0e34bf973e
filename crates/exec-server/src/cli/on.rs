//! Where a command works: from what was typed to how to connect.
//!
//! The one place that knows `--on`, `--url`, the variables and the list of environments.

use std::sync::Arc;

use anyhow::{Context as _, bail};
#[cfg(feature = "mcp")]
use exec_server_client::environment::Environment;
use exec_server_client::environment::connect::{Connect, from_url};
use exec_server_client::environment::{
    ConfiguredEnvironments, EnvironmentList, LOCAL, URL_VARIABLE,
};
use exec_server_client::registry::RegistryUrl;
use exec_server_client::{ExecServerClient, RemoteExecServerConnectArgs};

use super::args::ServerArgs;
use super::settings::variable;
use super::{access, registry};

/// Where a command works.
#[derive(Debug)]
pub(super) enum Place {
    /// On this machine, without a server.
    Here,
    /// Wherever this leads.
    There(There),
}

/// Another machine, or a server on this one.
#[derive(Debug)]
pub(super) struct There {
    /// The environment, or the URL.
    pub(super) name: String,
    connect: Arc<dyn Connect>,
}

impl There {
    /// As a value that connects when it is used, and again when it was lost.
    #[cfg(feature = "mcp")]
    pub(super) fn environment(&self) -> Environment {
        Environment::remote(self.name.clone(), Arc::clone(&self.connect))
    }

    /// Opens a session.
    pub(super) async fn connect(&self) -> anyhow::Result<ExecServerClient> {
        let session = self.connect.connect().await;
        // A URL is named by the error itself.
        if self.name.contains("://") {
            return Ok(session?);
        }
        session.with_context(|| format!("environment `{}`", self.name))
    }
}

/// Finds out where to work: `--on` or `--url`, else `EXEC_SERVER_URL`, else the default of
/// `environments.toml`, else here.
pub(super) fn resolve(server: &ServerArgs) -> anyhow::Result<Place> {
    if let Some(name) = &server.on {
        return named(name, server);
    }
    if let Some(url) = &server.url {
        return at_url(url, server);
    }
    let url = variable(URL_VARIABLE).filter(|url| !url.trim().is_empty());
    if let Some(url) = url {
        if url.trim().eq_ignore_ascii_case("none") {
            bail!("{URL_VARIABLE} is `none`: there is nowhere to work; pass --on or --url");
        }
        return at_url(url.trim(), server).with_context(|| URL_VARIABLE.to_owned());
    }
    let list = list()?;
    match &list.default {
        Some(id) => in_environment(id, &list, server),
        None => bail!(
            "there is no default environment; pass --on with one of {}",
            ids(&list)
        ),
    }
}

/// What `--on` means: an environment, or a URL.
pub(super) fn named(name: &str, server: &ServerArgs) -> anyhow::Result<Place> {
    if name.contains("://") {
        return at_url(name, server);
    }
    if name == LOCAL {
        return in_environment(name, &EnvironmentList::local(), server);
    }
    in_environment(name, &list()?, server)
}

/// How to reach a URL, with what flags and variables say about it.
fn at_url(url: &str, server: &ServerArgs) -> anyhow::Result<Place> {
    if RegistryUrl::matches(url) {
        return Ok(Place::There(There {
            name: url.to_owned(),
            connect: Arc::new(registry::target(url, server)?),
        }));
    }
    let name = format!("exec-server {}", env!("CARGO_PKG_VERSION"));
    let mut args = RemoteExecServerConnectArgs::new("", name);
    access::introduce(server, &mut args)?;
    Ok(Place::There(There {
        name: url.to_owned(),
        connect: from_url(url, args)?,
    }))
}

/// How to reach an environment; only what is said about itself counts.
fn in_environment(id: &str, list: &EnvironmentList, server: &ServerArgs) -> anyhow::Result<Place> {
    // A token is for one server, and nobody else should see it.
    if let Some(flag) = server.about_url() {
        bail!("{flag} is for --url; what environment `{id}` needs is said in its own settings");
    }
    if id == LOCAL {
        return Ok(Place::Here);
    }
    match list.entry(id) {
        Some(entry) => Ok(Place::There(There {
            name: id.to_owned(),
            connect: Arc::clone(&entry.connect),
        })),
        None => bail!("there is no environment `{id}`; there are {}", ids(list)),
    }
}

/// The environments that are configured; what was found and not used is told.
pub(super) fn list() -> anyhow::Result<EnvironmentList> {
    let list = configured().load()?;
    for warning in &list.warnings {
        eprintln!("exec-server: {warning}");
    }
    Ok(list)
}

/// Where the environments of this user are configured.
pub(super) fn configured() -> ConfiguredEnvironments {
    ConfiguredEnvironments::new(variable)
}

fn ids(list: &EnvironmentList) -> String {
    let ids: Vec<&str> = list.ids().collect();
    match ids[..] {
        [] => "none".to_owned(),
        _ => ids.join(", "),
    }
}
