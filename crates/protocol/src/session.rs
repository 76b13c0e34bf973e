//! `initialize`, `initialized` and `session/*`: the life of a session.

use serde::{Deserialize, Serialize};

use crate::environment::EnvironmentInfo;
use crate::method::{Empty, method_types, notifications};

method_types! {
    /// `initialize`: open a session or resume one.
    Initialize;
    /// `session/end`: end the session now, processes and all; the connection stays.
    End;
}

notifications! {
    /// `initialized`: the client has seen the answer to `initialize`.
    Initialized = "initialized" (Empty);
}

/// Params of [`Initialize`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitializeParams {
    /// What the client calls itself.
    pub client_name: String,
    /// The session to take up again; a new one if absent.
    #[serde(default)]
    pub resume_session_id: Option<String>,
    /// What the server gave to whoever drove the session last: with it, a session that is still
    /// attached to a connection is taken over from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_key: Option<String>,
    /// How long the session should outlive its connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detach_grace_ms: Option<u64>,
}

/// Result of [`Initialize`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitializeResponse {
    /// The session this connection now drives.
    pub session_id: String,
    /// What `environment/info` would say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment_info: Option<EnvironmentInfo>,
    /// How long the server grants the session without a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detach_grace_ms: Option<u64>,
    /// Lets this client take the session over from its own lost connection; stays the same until
    /// somebody else takes the session up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_key: Option<String>,
}
