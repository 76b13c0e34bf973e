//! `network/*`: managed networks, with a proxy for each process and a client that decides about
//! hosts.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::method::{Method, method_types, notifications};
use crate::params;

method_types! {
    /// `network/policyRequest`: the server requests the client's decision about a host.
    PolicyRequest;
}

impl Method for PolicyRequest {
    const NAME: &'static str = "network/policyRequest";
    type Params = PolicyRequestParams;
    type Result = PolicyRequestResult;
}

notifications! {
    /// `network/policyDecision`: final decision about a connection attempt.
    PolicyDecision = "network/policyDecision" (PolicyDecisionParams);
}

/// Restrictions of a process's network in addition to its proxy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ManagedNetwork {
    /// Ports of this machine on which proxies listen.
    pub loopback_ports: Vec<u16>,
    /// Whether the process may listen.
    pub allow_local_binding: bool,
    /// Whether the process may use every unix socket that it can see.
    pub dangerously_allow_all_unix_sockets: bool,
}

/// A proxy to start for a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkProxy {
    /// Settings of the proxy.
    #[serde(deserialize_with = "proxy_settings")]
    pub proxy: ProxySettings,
    /// Passed through unchanged, for audit logs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit_metadata: Option<BTreeMap<String, Value>>,
    /// The client's id of the environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment_id: Option<String>,
    /// The client's id of the execution.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution_id: Option<String>,
    /// Request the client's decision about hosts that no rule matches, with this timeout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_decision_timeout_ms: Option<u64>,
}

/// Rules and reviews must not be lost.
fn proxy_settings<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ProxySettings, D::Error> {
    let guarded = &[
        "domains",
        "unixSockets",
        "reviewDomains",
        "credentialMasking",
        "credentialProviders",
    ];
    params::object(deserializer, guarded)
}

/// Settings of a proxy.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProxySettings {
    /// Must be true.
    pub enabled: bool,
    /// Offer SOCKS5 in addition to HTTP.
    pub enable_socks5: bool,
    /// Forward UDP datagrams over SOCKS5, too.
    pub enable_socks5_udp: bool,
    /// Use the server's own upstream proxy.
    pub allow_upstream_proxy: bool,
    /// Allow connections to every unix socket.
    pub dangerously_allow_all_unix_sockets: bool,
    /// Allow connections to this machine and to private addresses.
    pub allow_local_binding: bool,
    /// Restriction of methods and protocols.
    pub mode: ProxyMode,
    /// Rules about hosts: `NAME`, `*.NAME` (below it), `**.NAME` (it and below), addresses, `*`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domains: Option<BTreeMap<String, DomainRule>>,
    /// Rules about unix sockets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unix_sockets: Option<BTreeMap<String, DomainRule>>,
    /// Hosts for which the client's decision is requested even though a rule allows them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub review_domains: Option<Vec<String>>,
    /// Keep credentials from the process and insert them into its requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential_masking: Option<bool>,
    /// Sources of those credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential_providers: Option<BTreeMap<String, CredentialProvider>>,
}

/// Source of one kind of credentials, and the requests into which they are inserted.
///
/// This project's servers do not support it: the type is checked, and the start is refused with the
/// reason.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CredentialProvider {
    /// Variables that contain a credential.
    pub env: Vec<String>,
    /// Patterns of credentials.
    pub patterns: Vec<String>,
    /// Prefixes of the URLs whose requests get the credential.
    pub url_prefixes: Vec<String>,
    /// Variable that contains such a prefix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url_prefix_from_env: Option<String>,
    /// How the credential is sent.
    pub auth: Vec<CredentialAuth>,
    /// Header that contains the credential.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header: Option<String>,
    /// Text before the credential in that header.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
}

/// How a credential is sent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CredentialAuth {
    /// `Authorization: Bearer`.
    Bearer,
    /// `Authorization: token`.
    Token,
    /// `Authorization: Basic`.
    Basic,
    /// A header with another name.
    Header(Value),
}

/// Restriction of methods and protocols.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProxyMode {
    /// No restriction.
    #[default]
    Full,
    /// Reading only: `GET`, `HEAD` and `OPTIONS` over unencrypted HTTP.
    Limited,
}

/// Effect of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DomainRule {
    /// The host is allowed.
    Allow,
    /// The host is denied.
    Deny,
    /// The rule has no effect.
    None,
}

/// Protocol of a connection attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyProtocol {
    /// Unencrypted HTTP.
    Http,
    /// `CONNECT` tunnel.
    HttpsConnect,
    /// SOCKS5 stream.
    Socks5Tcp,
    /// SOCKS5 datagram.
    Socks5Udp,
}

/// Params of [`PolicyRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyRequestParams {
    /// Id of the process that attempts the connection.
    pub process_id: String,
    /// The host that the process wants to reach.
    pub request: PolicyTarget,
}

/// Target of a connection attempt.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PolicyTarget {
    /// The protocol.
    pub protocol: PolicyProtocol,
    /// Host name or address.
    pub host: String,
    /// Port.
    pub port: u16,
}

/// Result of [`PolicyRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyRequestResult {
    /// The client's decision.
    pub decision: PolicyAnswer,
}

/// Decision of a client about a connection attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum PolicyAnswer {
    /// Allow the attempt.
    Allow,
    /// Deny the attempt.
    Deny {
        /// The reason.
        reason: String,
    },
    /// Deny for now: a user has to approve first.
    Ask {
        /// The reason.
        reason: String,
    },
}

impl PolicyAnswer {
    /// The decision if the client does not decide.
    pub fn not_allowed() -> Self {
        Self::Deny {
            reason: "not_allowed".to_owned(),
        }
    }
}

/// Subject of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyScope {
    /// The host.
    Domain,
    /// Something else, such as the method.
    NonDomain,
}

/// Outcome of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyOutcome {
    /// Allowed.
    Allow,
    /// Denied.
    Deny,
    /// Denied until a user approves.
    Ask,
}

/// The part that decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicySource {
    /// The rules that the proxy was started with.
    BaselinePolicy,
    /// The proxy's mode.
    ModeGuard,
    /// The proxy's state.
    ProxyState,
    /// The client.
    Decider,
}

/// Params of [`PolicyDecision`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyDecisionParams {
    /// Id of the process that attempted the connection.
    pub process_id: String,
    /// Time in UTC, with milliseconds.
    pub timestamp: String,
    /// Subject of the decision.
    pub scope: PolicyScope,
    /// Outcome of the decision.
    pub decision: PolicyOutcome,
    /// The part that decided.
    pub source: PolicySource,
    /// Machine-readable reason.
    pub reason: String,
    /// Protocol of the attempt.
    pub protocol: PolicyProtocol,
    /// Host name or address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// HTTP method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Address of the process's connection to the proxy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Whether the client allowed a host that the rules do not allow.
    pub policy_override: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn start_params_of_known_clients_are_parsed() {
        let proxy: NetworkProxy = serde_json::from_value(json!({
            "proxy": {
                "enabled": true, "enableSocks5": true, "enableSocks5Udp": false,
                "allowUpstreamProxy": false, "dangerouslyAllowAllUnixSockets": false,
                "allowLocalBinding": false, "mode": "limited", "somethingNew": 1,
                "domains": {"a.test": "allow", "b.test": "deny", "c.test": "none"},
            },
            "policyDecisionTimeoutMs": 1500,
            "auditMetadata": {"model": "m"},
        }))
        .unwrap();
        assert_eq!(proxy.proxy.mode, ProxyMode::Limited);
        assert_eq!(proxy.policy_decision_timeout_ms, Some(1500));
        let domains = proxy.proxy.domains.unwrap();
        assert_eq!(domains["b.test"], DomainRule::Deny);
        let managed: ManagedNetwork = serde_json::from_value(json!({})).unwrap();
        assert_eq!(managed, ManagedNetwork::default());
        let incomplete = json!({"proxy": {"enabled": true}});
        assert!(serde_json::from_value::<NetworkProxy>(incomplete).is_err());
    }

    #[test]
    fn answers_and_decisions_use_wire_names() {
        let answer = PolicyRequestResult {
            decision: PolicyAnswer::not_allowed(),
        };
        assert_eq!(
            serde_json::to_value(&answer).unwrap(),
            json!({"decision": {"type": "deny", "reason": "not_allowed"}})
        );
        let allow: PolicyAnswer = serde_json::from_value(json!({"type": "allow"})).unwrap();
        assert_eq!(allow, PolicyAnswer::Allow);
        let target = PolicyTarget {
            protocol: PolicyProtocol::HttpsConnect,
            host: "h".to_owned(),
            port: 1,
        };
        let expected = json!({"protocol": "https_connect", "host": "h", "port": 1});
        assert_eq!(serde_json::to_value(target).unwrap(), expected);
        let udp = serde_json::to_value(PolicyProtocol::Socks5Udp).unwrap();
        assert_eq!(udp, json!("socks5_udp"));
        let guard = serde_json::to_value(PolicySource::ModeGuard).unwrap();
        assert_eq!(guard, json!("mode_guard"));
        let scope = serde_json::to_value(PolicyScope::NonDomain).unwrap();
        assert_eq!(scope, json!("non_domain"));
    }
}
