//! What a request to start a process says about its network, as a plan.
//!
//! Owns the checks of launch objects and the choice between a proxy of our own, a bridge to one that
//! is there already, and none. Whoever starts the process provides the listeners that the plan wants,
//! in a namespace of their own or on this machine.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use exec_server_http::{Connector, HttpClient};
use exec_server_protocol::network::NetworkProxy;
use exec_server_protocol::process::StartParams;

use crate::bridge;
use crate::dial::SystemResolver;
use crate::gate::{Authority, Gate};
use crate::policy::Policy;
use crate::proxy::{Proxy, ProxyConfig, Sockets};
use crate::variables;

/// Where the proxy listens in a namespace of its own, where every port is free.
const HTTP_PORT: u16 = 43128;
const SOCKS_PORT: u16 = 41080;

/// How much longer than the client is given it is waited for: its answer has to come here.
const ANSWER_GRACE: Duration = Duration::from_secs(5);

/// The longest that anybody waits for an answer.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(24 * 60 * 60);

/// The longest name of a process that clients are asked about, in bytes.
const MAX_PROCESS_ID_BYTES: usize = 256;

/// Proxies of this machine that a bridge leads to.
const MAX_BRIDGES: usize = 16;

/// A launch object that makes no sense, or asks for what is not there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The proxy's settings make no sense.
    #[error("invalid network proxy config: {0}")]
    Config(String),
    /// There is no time to answer.
    #[error("network policy decision callback timeout must be nonzero")]
    NoTime,
    /// The client could not be told whose attempt it is.
    #[error(
        "network policy decisions need a process id of 1 to {MAX_PROCESS_ID_BYTES} bytes, not {0}"
    )]
    ProcessId(usize),
    /// There is no proxy to lead to.
    #[error("managed proxy mode requires proxy environment variables")]
    NoProxy,
    /// There are too many.
    #[error("{0} proxies exceed the limit of {MAX_BRIDGES}")]
    TooMany(usize),
}

/// Listeners that a plan wants, by their ports on the loopback interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// For streams.
    pub tcp: Vec<u16>,
    /// For datagrams.
    pub udp: Vec<u16>,
}

/// Listeners that a plan has got, in the order in which it wanted them.
#[derive(Debug, Default)]
pub struct Binding {
    /// For streams.
    pub tcp: Vec<TcpListener>,
    /// For datagrams.
    pub udp: Vec<UdpSocket>,
}

/// What a process's network will be.
#[derive(Debug)]
pub struct Plan {
    kind: Kind,
    /// The process is to have no other way out.
    enforced: bool,
    /// It may use any unix socket that it can see.
    unix_sockets: bool,
}

#[derive(Debug)]
enum Kind {
    Proxy {
        policy: Policy,
        socks: bool,
        udp: bool,
        allow_local: bool,
        patience: Option<Duration>,
        upstream: Option<Connector>,
    },
    /// To these ports of this machine.
    Bridge(Vec<u16>),
}

impl Plan {
    /// What a request asks for; `None` if it says nothing about the network. `env` is the child's
    /// environment; `http` knows whom whoever runs the server lets anybody reach, and by which proxy.
    ///
    /// # Errors
    ///
    /// When it makes no sense, or asks for what is not there: nothing is to be started then.
    pub fn of(
        params: &StartParams,
        env: &BTreeMap<String, String>,
        http: &HttpClient,
    ) -> Result<Option<Self>, PlanError> {
        let enforced = params.enforce_managed_network;
        let managed = params.managed_network.as_ref();
        let kind = match &params.network_proxy {
            Some(proxy) => proxy_of(proxy, &params.process_id, http)?,
            None if enforced => {
                let ports = variables::local_ports(env);
                match ports.len() {
                    0 => return Err(PlanError::NoProxy),
                    1..=MAX_BRIDGES => Kind::Bridge(ports),
                    many => return Err(PlanError::TooMany(many)),
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

    /// Whether the process is to have no other way out.
    pub fn is_enforced(&self) -> bool {
        self.enforced
    }

    /// Whether the process may use any unix socket that it can see.
    pub fn allows_unix_sockets(&self) -> bool {
        self.unix_sockets
    }

    /// How long somebody who is asked may take; `None` if nobody is.
    pub fn patience(&self) -> Option<Duration> {
        match &self.kind {
            Kind::Proxy { patience, .. } => *patience,
            Kind::Bridge(_) => None,
        }
    }

    /// The listeners that it wants in a network namespace of the process's own.
    pub fn wanted(&self) -> Wanted {
        match &self.kind {
            Kind::Proxy { socks, udp, .. } => Wanted {
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
            Kind::Bridge(ports) => Wanted {
                tcp: ports.clone(),
                udp: Vec::new(),
            },
        }
    }

    /// The listeners on this machine's own loopback interface, at ports that are free.
    ///
    /// # Errors
    ///
    /// When the machine is out of something.
    pub fn bind_here(&self) -> io::Result<Binding> {
        let wanted = self.wanted();
        let here = (Ipv4Addr::LOCALHOST, 0);
        let tcp = wanted.tcp.iter().map(|_| TcpListener::bind(here));
        let udp = wanted.udp.iter().map(|_| UdpSocket::bind(here));
        Ok(Binding {
            tcp: tcp.collect::<io::Result<_>>()?,
            udp: udp.collect::<io::Result<_>>()?,
        })
    }

    /// Tells the process where its proxy is: at the wanted ports, or where `here` listens.
    pub fn tell(&self, env: &mut BTreeMap<String, String>, here: Option<&Binding>) {
        let Kind::Proxy { allow_local, .. } = &self.kind else {
            return;
        };
        let ports = match here {
            None => self.wanted().tcp,
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

    /// Begins to serve at these listeners. Needs a tokio runtime; ends when the result is dropped.
    ///
    /// # Errors
    ///
    /// When they are not the wanted ones, or cannot be watched.
    pub fn serve(self, binding: Binding, authority: Arc<dyn Authority>) -> io::Result<Proxy> {
        let wanted = self.wanted();
        if binding.tcp.len() != wanted.tcp.len() || binding.udp.len() != wanted.udp.len() {
            return Err(io::Error::other(
                "the listeners are not those that were wanted",
            ));
        }
        match self.kind {
            Kind::Bridge(ports) => bridge::serve(binding.tcp.into_iter().zip(ports)),
            Kind::Proxy {
                policy,
                patience,
                upstream,
                ..
            } => {
                let mut tcp = binding.tcp.into_iter();
                let http = tcp
                    .next()
                    .ok_or_else(|| io::Error::other("there is no listener"))?;
                let sockets = Sockets {
                    http,
                    socks: tcp.next(),
                    udp: binding.udp.into_iter().next(),
                };
                let gate = Gate {
                    policy,
                    asks: patience.is_some(),
                    authority,
                    resolver: Arc::new(SystemResolver::default()),
                    upstream,
                };
                Proxy::start(ProxyConfig::default(), gate, sockets)
            }
        }
    }
}

fn proxy_of(launch: &NetworkProxy, process_id: &str, http: &HttpClient) -> Result<Kind, PlanError> {
    let settings = &launch.proxy;
    let config = |text: &str| PlanError::Config(text.to_owned());
    if !settings.enabled {
        return Err(config(
            "executor-local network proxy launch requires an enabled proxy",
        ));
    }
    if settings.credential_masking == Some(true) {
        return Err(config("credential masking is not available here"));
    }
    if settings.dangerously_allow_all_unix_sockets {
        return Err(config("this proxy does not reach unix sockets"));
    }
    let patience = match launch.policy_decision_timeout_ms {
        None => None,
        Some(0) => return Err(PlanError::NoTime),
        Some(_) if !(1..=MAX_PROCESS_ID_BYTES).contains(&process_id.len()) => {
            return Err(PlanError::ProcessId(process_id.len()));
        }
        Some(millis) => {
            let time = Duration::from_millis(millis).min(MAX_ANSWER_TIME);
            Some(time + ANSWER_GRACE)
        }
    };
    let connector = http.connector();
    let policy = Policy::new(settings, Arc::clone(connector.rules()))
        .map_err(|error| PlanError::Config(error.to_string()))?;
    Ok(Kind::Proxy {
        policy,
        socks: settings.enable_socks5,
        udp: settings.enable_socks5_udp,
        allow_local: settings.allow_local_binding,
        patience,
        upstream: settings.allow_upstream_proxy.then(|| connector.clone()),
    })
}

#[cfg(test)]
mod tests {
    use exec_server_http::HttpConfig;
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

    fn plan(params: &StartParams) -> Result<Option<Plan>, PlanError> {
        let http = HttpClient::new(HttpConfig::default());
        Plan::of(params, &params.env, &http)
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
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
    fn listeners_are_as_many_as_protocols() {
        let both = plan(&params(|_, _| {})).unwrap().unwrap();
        assert!(!both.is_enforced() && !both.allows_unix_sockets());
        assert_eq!(both.patience(), Some(Duration::from_secs(6)));
        assert_eq!(both.wanted().tcp, [HTTP_PORT, SOCKS_PORT]);
        assert!(both.wanted().udp.is_empty());
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
        assert_eq!(all.wanted().udp, [SOCKS_PORT]);
        assert_eq!(all.patience(), Some(MAX_ANSWER_TIME + ANSWER_GRACE));
        let one = params(|_, proxy| proxy.proxy.enable_socks5 = false);
        let one = plan(&one).unwrap().unwrap();
        assert_eq!(one.wanted().tcp, [HTTP_PORT]);
        let bound = one.bind_here().unwrap();
        let mut env = BTreeMap::new();
        one.tell(&mut env, Some(&bound));
        let port = bound.tcp[0].local_addr().unwrap().port();
        assert_eq!(env["all_proxy"], format!("http://127.0.0.1:{port}"));
        one.tell(&mut env, None);
        assert_eq!(env["all_proxy"], format!("http://127.0.0.1:{HTTP_PORT}"));
    }

    #[test]
    fn without_a_proxy_of_its_own_a_process_is_led_to_one_that_is_there() {
        let mut params = StartParams {
            enforce_managed_network: true,
            ..StartParams::default()
        };
        assert_eq!(plan(&params).unwrap_err(), PlanError::NoProxy);
        let set = |params: &mut StartParams, value: &str| {
            params
                .env
                .insert("HTTPS_PROXY".to_owned(), value.to_owned());
        };
        set(&mut params, "http://proxy.test:3128");
        assert_eq!(plan(&params).unwrap_err(), PlanError::NoProxy);
        set(&mut params, "http://127.0.0.1:3128");
        let bridge = plan(&params).unwrap().unwrap();
        assert_eq!(bridge.wanted().tcp, [3128]);
        params.enforce_managed_network = false;
        assert!(plan(&params).unwrap().is_none());
    }
}
