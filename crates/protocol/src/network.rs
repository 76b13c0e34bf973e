//! `network/*`: a network that the client manages, with a proxy beside each process.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::method::{Method, method_types, notifications};
use crate::params;

method_types! {
    /// `network/policyRequest`: the server asks its client whether a host may be reached.
    PolicyRequest;
}

impl Method for PolicyRequest {
    const NAME: &'static str = "network/policyRequest";
    type Params = PolicyRequestParams;
    type Result = PolicyRequestResult;
}

notifications! {
    /// `network/policyDecision`: what became of an attempt to reach somebody.
    PolicyDecision = "network/policyDecision" (PolicyDecisionParams);
}

/// How a process's network is confined, beside its proxy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ManagedNetwork {
    /// Ports of this machine that proxies listen at.
    pub loopback_ports: Vec<u16>,
    /// The process may listen.
    pub allow_local_binding: bool,
    /// The process may use any unix socket that it can see.
    pub dangerously_allow_all_unix_sockets: bool,
}

/// A proxy to start beside a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkProxy {
    /// What it does.
    #[serde(deserialize_with = "proxy_settings")]
    pub proxy: ProxySettings,
    /// Passed through to whoever keeps records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit_metadata: Option<BTreeMap<String, Value>>,
    /// Which environment of the client this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment_id: Option<String>,
    /// Which execution of the client this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution_id: Option<String>,
    /// Ask the client about hosts that no rule is about, and wait for this long.
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

/// What a proxy does.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProxySettings {
    /// Must be true.
    pub enabled: bool,
    /// Offer SOCKS5 beside HTTP.
    pub enable_socks5: bool,
    /// Carry datagrams too.
    pub enable_socks5_udp: bool,
    /// Go through the proxy that the server itself is told to use.
    pub allow_upstream_proxy: bool,
    /// Reach any unix socket on behalf of the process.
    pub dangerously_allow_all_unix_sockets: bool,
    /// Reach this machine and private addresses.
    pub allow_local_binding: bool,
    /// What may be done where.
    pub mode: ProxyMode,
    /// Rules about hosts: `NAME`, `*.NAME` (below it), `**.NAME` (it and below), addresses, `*`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domains: Option<BTreeMap<String, DomainRule>>,
    /// Rules about unix sockets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unix_sockets: Option<BTreeMap<String, DomainRule>>,
    /// Hosts that the client is asked about even though a rule allows them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub review_domains: Option<Vec<String>>,
    /// Keep credentials from the process and put them into its requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential_masking: Option<bool>,
    /// Where those credentials come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential_providers: Option<Value>,
}

/// What may be done where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProxyMode {
    /// Everything, with allowed hosts.
    #[default]
    Full,
    /// Looking only: `GET`, `HEAD` and `OPTIONS`, in the clear.
    Limited,
}

/// What a rule says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DomainRule {
    /// Yes.
    Allow,
    /// No.
    Deny,
    /// Nothing.
    None,
}

/// How somebody was to be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyProtocol {
    /// A request in the clear.
    Http,
    /// `CONNECT`.
    HttpsConnect,
    /// A stream over SOCKS5.
    Socks5Tcp,
    /// A datagram over SOCKS5.
    Socks5Udp,
}

/// Params of [`PolicyRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyRequestParams {
    /// Whose attempt it is.
    pub process_id: String,
    /// What it attempts.
    pub request: PolicyTarget,
}

/// Whom a process wants to reach.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PolicyTarget {
    /// How.
    pub protocol: PolicyProtocol,
    /// A name or an address.
    pub host: String,
    /// The port.
    pub port: u16,
}

/// Result of [`PolicyRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyRequestResult {
    /// The client's word.
    pub decision: PolicyAnswer,
}

/// A client's word on an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum PolicyAnswer {
    /// Go on.
    Allow,
    /// No.
    Deny {
        /// Why.
        reason: String,
    },
    /// Not now: somebody has to be asked first.
    Ask {
        /// Why.
        reason: String,
    },
}

impl PolicyAnswer {
    /// What is said when nobody can say anything.
    pub fn not_allowed() -> Self {
        Self::Deny {
            reason: "not_allowed".to_owned(),
        }
    }
}

/// What a decision is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyScope {
    /// The host.
    Domain,
    /// Something else.
    NonDomain,
}

/// What was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyOutcome {
    /// Go on.
    Allow,
    /// No.
    Deny,
    /// Not now.
    Ask,
}

/// Who decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicySource {
    /// The rules that the proxy was started with.
    BaselinePolicy,
    /// Its mode.
    ModeGuard,
    /// The state that it is in.
    ProxyState,
    /// The client, when asked.
    Decider,
}

/// Params of [`PolicyDecision`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyDecisionParams {
    /// Whose attempt it was.
    pub process_id: String,
    /// When, in UTC and with milliseconds.
    pub timestamp: String,
    /// What the decision is about.
    pub scope: PolicyScope,
    /// What was decided.
    pub decision: PolicyOutcome,
    /// By whom.
    pub source: PolicySource,
    /// Why.
    pub reason: String,
    /// How somebody was to be reached.
    pub protocol: PolicyProtocol,
    /// Who.
    pub host: String,
    /// At which port.
    pub port: u16,
    /// With which method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// From where.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Whether the client's word went beyond the rules.
    pub policy_override: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn launch_objects_are_read_as_clients_write_them() {
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
    fn answers_and_decisions_have_the_names_of_the_wire() {
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
