//! `initialize`, `initialized` and `session/*`: lifecycle of a session.

use std::fmt;

use serde::de::{self, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::environment::EnvironmentInfo;
use crate::method::{Empty, method_types, notifications};
use crate::params::{EVERYWHERE, check_member};

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

/// Params of [`End`]: absent, `null`, or an object.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndParams {
    /// Time from SIGTERM to SIGKILL for processes that still run; without it they get SIGKILL now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
}

impl<'de> Deserialize<'de> for EndParams {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = EndParams;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("no params, null or an object")
            }
            fn visit_unit<E: de::Error>(self) -> Result<EndParams, E> {
                Ok(EndParams::default())
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<EndParams, A::Error> {
                let mut params = EndParams::default();
                while let Some(key) = map.next_key::<String>()? {
                    if key == "graceMs" {
                        params.grace_ms = map.next_value()?;
                    } else {
                        check_member(&key, &["graceMs"], EVERYWHERE)?;
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(params)
            }
        }
        deserializer.deserialize_any(Fields)
    }
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
    /// Id of the running server; a restarted server has another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_instance: Option<String>,
    /// When the server was started, in milliseconds since the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_started_at_ms: Option<u64>,
}
