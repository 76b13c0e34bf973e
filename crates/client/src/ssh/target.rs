//! `ssh://` as a `Connect` implementation.

use std::sync::Arc;

use exec_server_protocol::PathUri;
use exec_server_protocol::process::StartParams;

use super::{SshHost, SshOptions};
use crate::client::ExecServerClient;
use crate::environment::connect::{
    ChangeOptions, Connect, ConnectTime, ENVIRONMENT_CLIENT_NAME, SessionAndStart,
};
use crate::error::Reply;
use crate::map::PathMap;
use crate::options::ExecServerClientConnectOptions;

/// Connection target that is reached through ssh.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SshTarget {
    /// Connection options of the host.
    pub ssh: SshOptions,
    /// Path mapping between a local and a remote directory, if paths are to be translated.
    pub map: Option<PathMap>,
    /// Connection options for the handshake.
    pub options: ExecServerClientConnectOptions,
}

impl SshTarget {
    /// Creates a target without a path mapping.
    pub fn new(ssh: SshOptions) -> Self {
        Self {
            ssh,
            map: None,
            options: ExecServerClientConnectOptions::new(ENVIRONMENT_CLIENT_NAME),
        }
    }
}

impl Connect for SshTarget {
    fn connect(&self) -> Reply<'_, ExecServerClient> {
        Box::pin(async move {
            let host = SshHost::new(self.ssh.clone())?;
            let client = host.connect(self.options.clone()).await?;
            host.remember(&client).await;
            Ok(client)
        })
    }

    fn connect_and_start(&self, params: StartParams) -> Reply<'_, SessionAndStart> {
        Box::pin(async move {
            let host = SshHost::new(self.ssh.clone())?;
            let options = self.options.clone();
            let started = ExecServerClient::connect_and_start(host.clone(), options, params);
            let (client, started) = started.await?;
            host.remember(&client).await;
            Ok((client, started))
        })
    }

    fn directory(&self) -> Option<PathUri> {
        SshHost::new(self.ssh.clone()).ok()?.remembered()
    }

    fn target(&self) -> String {
        self.ssh.url.to_string()
    }

    fn start(&self) -> ConnectTime {
        // Connecting may prompt for a password or install a binary.
        ConnectTime::OnUse
    }

    fn map(&self) -> Option<&PathMap> {
        self.map.as_ref()
    }

    fn with_options(&self, change: &ChangeOptions<'_>) -> Option<Arc<dyn Connect>> {
        let mut changed = self.clone();
        change(&mut changed.options);
        Some(Arc::new(changed))
    }

    fn ssh(&self) -> Option<&SshTarget> {
        Some(self)
    }
}
