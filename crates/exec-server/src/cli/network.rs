//! Network policy of a command, from options, and questions about hosts on the terminal.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::bail;
use exec_server_client::{BoxFuture, NetworkPolicyDecider};
use exec_server_protocol::network::{
    DomainRule, NetworkProxy, PolicyAnswer, PolicyProtocol, PolicyTarget, ProxySettings,
};
use exec_server_sync::Mutex;
use rustix::termios;
use tokio::sync::oneshot;

use super::args::NetworkArgs;
use super::table::visible;

/// Timeout of a question on the terminal.
const TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// Path of the controlling terminal, which works even if the standard streams are redirected.
const TERMINAL: &str = "/dev/tty";

/// The network settings of the options, if any.
pub(super) fn of(args: &NetworkArgs) -> Option<NetworkProxy> {
    if args.net_allow.is_empty() && args.net_deny.is_empty() && !args.net_ask {
        return None;
    }
    let rules = |texts: &[String], says| -> Vec<(String, DomainRule)> {
        texts.iter().map(|text| (text.clone(), says)).collect()
    };
    let mut domains = rules(&args.net_allow, DomainRule::Allow);
    // Denied hosts come last, so that a host that is both allowed and denied is denied.
    domains.extend(rules(&args.net_deny, DomainRule::Deny));
    Some(NetworkProxy {
        proxy: ProxySettings {
            enabled: true,
            enable_socks5: true,
            enable_socks5_udp: true,
            domains: Some(domains.into_iter().collect()),
            ..ProxySettings::default()
        },
        audit_metadata: None,
        environment_id: None,
        execution_id: None,
        policy_decision_timeout_ms: args
            .net_ask
            .then(|| u64::try_from(TIMEOUT.as_millis()).unwrap_or(u64::MAX)),
    })
}

/// Keys that the user types while a question waits for an answer.
#[derive(Debug, Default)]
pub(super) struct TypedKeys {
    state: Mutex<WaitingQuestion>,
}

#[derive(Debug, Default)]
struct WaitingQuestion {
    question: Option<oneshot::Sender<u8>>,
    /// Standard input has ended.
    ended: bool,
}

impl TypedKeys {
    /// Takes typed keys if a question waits for an answer, and returns whether one did. The first
    /// key is the answer.
    pub(super) fn take(&self, typed: &[u8]) -> bool {
        match (self.state.lock().question.take(), typed.first()) {
            (Some(question), Some(&key)) => question.send(key).is_ok(),
            _ => false,
        }
    }

    /// Reports the end of standard input.
    pub(super) fn end(&self) {
        let mut state = self.state.lock();
        state.ended = true;
        state.question = None;
    }

    fn wait(&self) -> Option<oneshot::Receiver<u8>> {
        let mut state = self.state.lock();
        if state.ended {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        state.question = Some(sender);
        Some(receiver)
    }
}

/// Asks on the terminal about hosts without a rule.
#[derive(Debug)]
pub(super) struct TerminalDecider {
    /// Source of the keys if standard input is the terminal, because another thread reads it then.
    keys: Option<Arc<TypedKeys>>,
    /// Lock for one question at a time.
    turn: tokio::sync::Mutex<RememberedAnswers>,
}

/// Answers that apply to later requests.
#[derive(Debug, Default)]
struct RememberedAnswers {
    /// Hosts that the user allowed until the command ends.
    always: HashSet<String>,
    /// Host of the last question, its answer, and the time of the answer.
    last: Option<(String, bool, Instant)>,
}

impl TerminalDecider {
    /// Creates the decider; fails without a terminal.
    pub(super) fn new(keys: Arc<TypedKeys>) -> anyhow::Result<Self> {
        if File::options()
            .read(true)
            .write(true)
            .open(TERMINAL)
            .is_err()
        {
            bail!("--net-ask: there is no terminal to ask on; use --net-allow");
        }
        let shared = termios::isatty(rustix::stdio::stdin());
        Ok(Self {
            keys: shared.then_some(keys),
            turn: tokio::sync::Mutex::default(),
        })
    }

    /// The first key of the answer; `None` if the terminal gives no answer.
    async fn key(&self, question: String) -> Option<u8> {
        let Some(keys) = &self.keys else {
            let answer = tokio::task::spawn_blocking(move || ask_without_reader(&question));
            return answer.await.ok()?.ok();
        };
        let answer = keys.wait()?;
        write_terminal(&question);
        let key = answer.await.ok()?;
        write_terminal(if key.is_ascii_graphic() {
            "\r\n"
        } else {
            "no\r\n"
        });
        Some(key)
    }
}

impl NetworkPolicyDecider for TerminalDecider {
    fn decide(&self, target: PolicyTarget) -> BoxFuture<'_, PolicyAnswer> {
        let since = Instant::now();
        Box::pin(async move {
            let mut memory = self.turn.lock().await;
            let name = format!("{}:{}", target.host, target.port);
            let said_meanwhile = match &memory.last {
                Some((host, said, when)) if *host == name && *when >= since => Some(*said),
                _ => None,
            };
            let allowed = if memory.always.contains(&target.host) {
                true
            } else if let Some(said) = said_meanwhile {
                // The request arrived before the answer to the previous question about the same
                // host.
                said
            } else {
                let how = match target.protocol {
                    PolicyProtocol::Http => "in the clear",
                    PolicyProtocol::HttpsConnect => "by a tunnel",
                    PolicyProtocol::Socks5Tcp => "by SOCKS",
                    PolicyProtocol::Socks5Udp => "by SOCKS, with datagrams",
                };
                let host = visible(&target.host);
                let port = target.port;
                let question = format!(
                    "exec-server: may the command reach {host}, port {port}, {how}? \
                     [y]es, [n]o, [a]lways: "
                );
                let key = self.key(question).await.map(|key| key.to_ascii_lowercase());
                if key == Some(b'a') {
                    memory.always.insert(target.host.clone());
                }
                matches!(key, Some(b'y' | b'a'))
            };
            memory.last = Some((name, allowed, Instant::now()));
            if allowed {
                PolicyAnswer::Allow
            } else {
                PolicyAnswer::Deny {
                    reason: "refused at the terminal".to_owned(),
                }
            }
        })
    }
}

/// Writes to the terminal even if output is redirected, also in raw mode.
fn write_terminal(text: &str) {
    if let Ok(mut terminal) = File::options().write(true).open(TERMINAL) {
        let _ = terminal.write_all(text.as_bytes());
    }
}

/// Asks on a terminal that has no other reader.
fn ask_without_reader(question: &str) -> io::Result<u8> {
    let mut terminal = File::options().read(true).write(true).open(TERMINAL)?;
    terminal.write_all(question.as_bytes())?;
    let mut line = String::new();
    BufReader::new(terminal).read_line(&mut line)?;
    let first = line.trim().bytes().next();
    first.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn net_options_become_network_rules() {
        let args = |allow: &[&str], deny: &[&str], net_ask| NetworkArgs {
            net_allow: allow.iter().map(|&text| text.to_owned()).collect(),
            net_deny: deny.iter().map(|&text| text.to_owned()).collect(),
            net_ask,
        };
        assert_eq!(of(&args(&[], &[], false)), None);
        let proxy = of(&args(&["a", "b"], &["b"], false)).unwrap();
        let domains = proxy.proxy.domains.unwrap();
        assert_eq!(domains["a"], DomainRule::Allow);
        assert_eq!(domains["b"], DomainRule::Deny);
        assert_eq!(proxy.policy_decision_timeout_ms, None);
        let asks = of(&args(&[], &[], true)).unwrap();
        assert_eq!(asks.policy_decision_timeout_ms, Some(300_000));
    }

    #[tokio::test]
    async fn typed_keys_answer_a_waiting_question() {
        let keys = TypedKeys::default();
        assert!(!keys.take(b"x"));
        let answer = keys.wait().unwrap();
        assert!(keys.take(b"yes\n"));
        assert_eq!(answer.await, Ok(b'y'));
        assert!(!keys.take(b"x"));
        let never = keys.wait().unwrap();
        keys.end();
        assert!(never.await.is_err());
        assert!(keys.wait().is_none());
    }
}
