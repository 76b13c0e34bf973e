//! Network plan of one process, parsed from `networkProxy` and `enforceManagedNetwork`.
//!
//! Validates launch objects and chooses between a proxy of this server, a bridge to an existing
//! proxy, and no network. The caller provides the listeners, in a network namespace or on this
//! machine.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::network::NetworkProxy;
use exec_server_protocol::process::StartParams;

use crate::http::{Connector, HttpClient};
use crate::network::access::{AccessCheck, PolicyDecider};
use crate::network::bridge;
use crate::network::dial::SystemResolver;
use crate::network::policy::HostPolicy;
use crate::network::proxy::{Proxy, ProxyConfig, ProxySockets};
use crate::network::variables;

/// Port of the proxy in a network namespace, where every port is free.
const HTTP_PORT: u16 = 43128;
const SOCKS_PORT: u16 = 41080;

/// Added to the client's decision timeout, so that its answer has time to arrive.
const ANSWER_GRACE: Duration = Duration::from_secs(5);

/// The longest decision timeout: one day.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(24 * 60 * 60);

/// The longest process id that is sent to a client for decisions, in bytes.
const MAX_PROCESS_ID_BYTES: usize = 256;

/// The most existing proxies that a bridge forwards to.
const MAX_BRIDGES: usize = 16;

/// A launch object that is not valid or cannot be satisfied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkPlanError {
    /// The proxy's settings are not valid.
    #[error("invalid network proxy config: {0}")]
    Config(String),
    /// The decision timeout is zero.
    #[error("network policy decision callback timeout must be nonzero")]
    ZeroTimeout,
    /// The process id is empty or too long for requests to the client.
    #[error(
        "network policy decisions need a process id of 1 to {MAX_PROCESS_ID_BYTES} bytes, not {0}"
    )]
    ProcessId(usize),
    /// The environment names no proxy on this machine.
    #[error("managed proxy mode requires proxy environment variables")]
    NoProxy,
    /// The environment names too many proxies.
    #[error("{0} proxies exceed the limit of {MAX_BRIDGES}")]
    TooManyProxies(usize),
}

/// Ports on the loopback interface at which a plan needs listeners.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListenerPorts {
    /// Stream listeners.
    pub tcp: Vec<u16>,
    /// Datagram sockets.
    pub udp: Vec<u16>,
}

/// Bound listeners for a plan, in the order of its [`ListenerPorts`].
#[derive(Debug, Default)]
pub struct BoundListeners {
    /// Stream listeners.
    pub tcp: Vec<TcpListener>,
    /// Datagram sockets.
    pub udp: Vec<UdpSocket>,
}

/// Network plan of one process.
#[derive(Debug)]
pub struct NetworkPlan {
    kind: NetworkPlanKind,
    /// Whether the process must have no other network access.
    enforced: bool,
    /// Whether the process may use every unix socket that it can see.
    unix_sockets: bool,
}

#[derive(Debug)]
enum NetworkPlanKind {
    Proxy {
        policy: HostPolicy,
        socks: bool,
        udp: bool,
        allow_local: bool,
        decision_timeout: Option<Duration>,
        upstream: Option<Connector>,
    },
    /// Forward to these ports of this machine.
    Bridge(Vec<u16>),
}

impl NetworkPlan {
    /// Parses the network settings of a request; `None` if it has none. `env` is the child's
    /// environment; `http` provides the server's rules and upstream proxies.
    ///
    /// # Errors
    ///
    /// The settings are not valid or cannot be satisfied; the process must not be started.
    pub fn of(
        params: &StartParams,
        env: &BTreeMap<String, String>,
        http: &HttpClient,
    ) -> Result<Option<Self>, NetworkPlanError> {
        let enforced = params.enforce_managed_network;
        let managed = params.managed_network.as_ref();
        let kind = match &params.network_proxy {
            Some(proxy) => proxy_of(proxy, &params.process_id, http)?,
            None if enforced => {
                let ports = variables::local_ports(env);
                match ports.len() {
                    0 => return Err(NetworkPlanError::NoProxy),
                    1..=MAX_BRIDGES => NetworkPlanKind::Bridge(ports),
                    many => return Err(NetworkPlanError::TooManyProxies(many)),
                }
            }
            None => return Ok(None),
        };
        Ok(Some(Self {
            kind,
            enforced,
            unix_sockets: managed.is_some_and(|m| m.dangerously_allow_all_unix_sockets),
        }))
    }

    /// Whether the process must have no other network access.
    pub fn is_enforced(&self) -> bool {
        self.enforced
    }

    /// Whether the process may use every unix socket that it can see.
    pub fn allows_unix_sockets(&self) -> bool {
        self.unix_sockets
    }

    /// Time limit for one decision of the client; `None` if the client is not called.
    pub fn decision_timeout(&self) -> Option<Duration> {
        match &self.kind {
            NetworkPlanKind::Proxy {
                decision_timeout, ..
            } => *decision_timeout,
            NetworkPlanKind::Bridge(_) => None,
        }
    }

    /// Returns the ports that the plan needs in a network namespace of the process.
    pub fn listener_ports(&self) -> ListenerPorts {
        match &self.kind {
            NetworkPlanKind::Proxy { socks, udp, .. } => ListenerPorts {
                tcp: if *socks {
                    vec![HTTP_PORT, SOCKS_PORT]
                } else {
                    vec![HTTP_PORT]
                },
                udp: if *socks && *udp {
                    vec![SOCKS_PORT]
                } else {
                    Vec::new()
                },
            },
            NetworkPlanKind::Bridge(ports) => ListenerPorts {
                tcp: ports.clone(),
                udp: Vec::new(),
            },
        }
    }

    /// Binds listeners to free ports of this machine's loopback interface.
    ///
    /// # Errors
    ///
    /// Binding fails, for example for lack of descriptors.
    pub fn bind_here(&self) -> io::Result<BoundListeners> {
        let listener_ports = self.listener_ports();
        let here = (Ipv4Addr::LOCALHOST, 0);
        let tcp = listener_ports.tcp.iter().map(|_| TcpListener::bind(here));
        let udp = listener_ports.udp.iter().map(|_| UdpSocket::bind(here));
        Ok(BoundListeners {
            tcp: tcp.collect::<io::Result<_>>()?,
            udp: udp.collect::<io::Result<_>>()?,
        })
    }

    /// Sets the process's proxy variables to the planned ports, or to those of `here`.
    pub fn set_variables(&self, env: &mut BTreeMap<String, String>, here: Option<&BoundListeners>) {
        let NetworkPlanKind::Proxy { allow_local, .. } = &self.kind else {
            return;
        };
        let ports = match here {
            None => self.listener_ports().tcp,
            Some(binding) => {
                let ports = binding.tcp.iter().map(|listener| listener.local_addr());
                ports
                    .map(|address| address.map_or(0, |a| a.port()))
                    .collect()
            }
        };
        if let Some(&http) = ports.first() {
            variables::set(env, http, ports.get(1).copied(), *allow_local);
        }
    }

    /// Starts the proxy on these listeners. Needs a tokio runtime. Dropping the result ends the
    /// proxy.
    ///
    /// # Errors
    ///
    /// The listeners do not match the plan, or cannot be registered with the runtime.
    pub fn serve(
        self,
        binding: BoundListeners,
        decider: Arc<dyn PolicyDecider>,
    ) -> io::Result<Proxy> {
        let listener_ports = self.listener_ports();
        if binding.tcp.len() != listener_ports.tcp.len()
            || binding.udp.len() != listener_ports.udp.len()
        {
            return Err(io::Error::other("the listeners do not match the plan"));
        }
        match self.kind {
            NetworkPlanKind::Bridge(ports) => bridge::serve(binding.tcp.into_iter().zip(ports)),
            NetworkPlanKind::Proxy {
                policy,
                decision_timeout,
                upstream,
                ..
            } => {
                let mut tcp = binding.tcp.into_iter();
                let http = tcp
                    .next()
                    .ok_or_else(|| io::Error::other("the HTTP listener is missing"))?;
                let sockets = ProxySockets {
                    http,
                    socks: tcp.next(),
                    udp: binding.udp.into_iter().next(),
                };
                let access = AccessCheck {
                    policy,
                    asks_client: decision_timeout.is_some(),
                    decider,
                    resolver: Arc::new(SystemResolver::default()),
                    upstream,
                };
                Proxy::start(ProxyConfig::default(), access, sockets)
            }
        }
    }
}

fn proxy_of(
    launch: &NetworkProxy,
    process_id: &str,
    http: &HttpClient,
) -> Result<NetworkPlanKind, NetworkPlanError> {
    let settings = &launch.proxy;
    let config = |text: &str| NetworkPlanError::Config(text.to_owned());
    if !settings.enabled {
        return Err(config(
            "executor-local network proxy launch requires an enabled proxy",
        ));
    }
    if settings.credential_masking == Some(true) {
        return Err(config("credential masking is not available here"));
    }
    if settings
        .credential_providers
        .as_ref()
        .is_some_and(|providers| !providers.is_empty())
    {
        return Err(config(
            "`credentialProviders` is not supported: credential masking is not available here",
        ));
    }
    if settings.dangerously_allow_all_unix_sockets {
        return Err(config("this proxy does not reach unix sockets"));
    }
    let decision_timeout = match launch.policy_decision_timeout_ms {
        None => None,
        Some(0) => return Err(NetworkPlanError::ZeroTimeout),
        Some(_) if !(1..=MAX_PROCESS_ID_BYTES).contains(&process_id.len()) => {
            return Err(NetworkPlanError::ProcessId(process_id.len()));
        }
        Some(millis) => {
            let time = Duration::from_millis(millis).min(MAX_ANSWER_TIME);
            Some(time + ANSWER_GRACE)
        }
    };
    let connector = http.connector();
    let policy = HostPolicy::new(settings, Arc::clone(connector.rules()))
        .map_err(|error| NetworkPlanError::Config(error.to_string()))?;
    Ok(NetworkPlanKind::Proxy {
        policy,
        socks: settings.enable_socks5,
        udp: settings.enable_socks5_udp,
        allow_local: settings.allow_local_binding,
        decision_timeout,
        upstream: settings.allow_upstream_proxy.then(|| connector.clone()),
    })
}

#[cfg(test)]
mod tests {
    use crate::http::HttpConfig;
    use exec_server_protocol::network::{ManagedNetwork, ProxySettings};

    use super::*;

    fn params(set: impl FnOnce(&mut StartParams, &mut NetworkProxy)) -> StartParams {
        let mut params = StartParams {
            process_id: "p".to_owned(),
            ..StartParams::default()
        };
        let mut proxy = NetworkProxy {
            proxy: ProxySettings {
                enabled: true,
                enable_socks5: true,
                ..ProxySettings::default()
            },
            audit_metadata: None,
            environment_id: None,
            execution_id: None,
            policy_decision_timeout_ms: Some(1000),
        };
        set(&mut params, &mut proxy);
        params.network_proxy = Some(proxy);
        params
    }

    fn plan(params: &StartParams) -> Result<Option<NetworkPlan>, NetworkPlanError> {
        let http = HttpClient::new(HttpConfig::default());
        NetworkPlan::of(params, &params.env, &http)
    }

    #[test]
    fn invalid_settings_are_rejected_with_a_reason() {
        let refusal = |set: fn(&mut StartParams, &mut NetworkProxy)| {
            plan(&params(set)).unwrap_err().to_string()
        };
        let disabled = refusal(|_, proxy| proxy.proxy.enabled = false);
        assert!(disabled.contains("requires an enabled proxy"), "{disabled}");
        let no_time = refusal(|_, proxy| proxy.policy_decision_timeout_ms = Some(0));
        assert!(no_time.contains("must be nonzero"), "{no_time}");
        let nameless = refusal(|params, _| params.process_id.clear());
        assert!(nameless.contains("not 0"), "{nameless}");
        let long = refusal(|params, _| params.process_id = "x".repeat(257));
        assert!(long.contains("not 257"), "{long}");
        let masked = refusal(|_, proxy| proxy.proxy.credential_masking = Some(true));
        assert!(masked.contains("credential masking"), "{masked}");
        let unix = refusal(|_, proxy| proxy.proxy.dangerously_allow_all_unix_sockets = true);
        assert!(unix.contains("unix sockets"), "{unix}");
        let review = refusal(|_, proxy| proxy.proxy.review_domains = Some(vec!["/".to_owned()]));
        assert!(review.contains("pattern syntax: /"), "{review}");
    }

    #[test]
    fn listener_ports_match_enabled_protocols() {
        let both = plan(&params(|_, _| {})).unwrap().unwrap();
        assert!(!both.is_enforced() && !both.allows_unix_sockets());
        assert_eq!(both.decision_timeout(), Some(Duration::from_secs(6)));
        assert_eq!(both.listener_ports().tcp, [HTTP_PORT, SOCKS_PORT]);
        assert!(both.listener_ports().udp.is_empty());
        let all = params(|params, proxy| {
            params.enforce_managed_network = true;
            params.managed_network = Some(ManagedNetwork {
                dangerously_allow_all_unix_sockets: true,
                ..ManagedNetwork::default()
            });
            proxy.proxy.enable_socks5_udp = true;
            proxy.policy_decision_timeout_ms = Some(u64::MAX);
        });
        let all = plan(&all).unwrap().unwrap();
        assert!(all.is_enforced() && all.allows_unix_sockets());
        assert_eq!(all.listener_ports().udp, [SOCKS_PORT]);
        assert_eq!(all.decision_timeout(), Some(MAX_ANSWER_TIME + ANSWER_GRACE));
        let one = params(|_, proxy| proxy.proxy.enable_socks5 = false);
        let one = plan(&one).unwrap().unwrap();
        assert_eq!(one.listener_ports().tcp, [HTTP_PORT]);
        let bound = one.bind_here().unwrap();
        let mut env = BTreeMap::new();
        one.set_variables(&mut env, Some(&bound));
        let port = bound.tcp[0].local_addr().unwrap().port();
        assert_eq!(env["all_proxy"], format!("http://127.0.0.1:{port}"));
        one.set_variables(&mut env, None);
        assert_eq!(env["all_proxy"], format!("http://127.0.0.1:{HTTP_PORT}"));
    }

    #[test]
    fn enforced_network_without_settings_bridges_to_proxies_in_environment() {
        let mut params = StartParams {
            enforce_managed_network: true,
            ..StartParams::default()
        };
        assert_eq!(plan(&params).unwrap_err(), NetworkPlanError::NoProxy);
        let set = |params: &mut StartParams, value: &str| {
            params
                .env
                .insert("HTTPS_PROXY".to_owned(), value.to_owned());
        };
        set(&mut params, "http://proxy.test:3128");
        assert_eq!(plan(&params).unwrap_err(), NetworkPlanError::NoProxy);
        set(&mut params, "http://127.0.0.1:3128");
        let bridge = plan(&params).unwrap().unwrap();
        assert_eq!(bridge.listener_ports().tcp, [3128]);
        params.enforce_managed_network = false;
        assert!(plan(&params).unwrap().is_none());
    }
}
