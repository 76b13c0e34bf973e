//! `initialize`, `initialized` and `session/*`: lifecycle of a session.

use serde::{Deserialize, Serialize};

use crate::environment::EnvironmentInfo;
use crate::method::{Empty, method_types, notifications};

method_types! {
    /// `initialize`: open a session or resume one.
    Initialize;
    /// `session/end`: end the session and its processes now; the connection stays open.
    End;
}

notifications! {
    /// `initialized`: the client has received the response to `initialize`.
    Initialized = "initialized" (Empty);
}

/// Params of [`Initialize`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitializeParams {
    /// Name of the client program.
    pub client_name: String,
    /// Id of the session to resume; a new session if absent.
    #[serde(default)]
    pub resume_session_id: Option<String>,
    /// The key that the server issued to the session's previous client. With it, a session that is
    /// still attached to another connection is taken over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_key: Option<String>,
    /// Requested lifetime of the session without a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detach_grace_ms: Option<u64>,
}

/// Result of [`Initialize`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitializeResponse {
    /// Id of the session that this connection is attached to.
    pub session_id: String,
    /// The result of `environment/info`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment_info: Option<EnvironmentInfo>,
    /// Granted lifetime of the session without a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detach_grace_ms: Option<u64>,
    /// Key with which this client can take the session over from its own lost connection. It
    /// changes when another client resumes the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_key: Option<String>,
}
