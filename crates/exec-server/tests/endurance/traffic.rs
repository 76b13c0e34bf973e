//! Requests over HTTP, questions about networks, and streams of the relay: after many of them, as
//! many bytes are allocated as before.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use exec_server::http::{ExecutorHttp as _, HttpRequest};
use exec_server::protocol::network::{NetworkProxy, PolicyAnswer, PolicyTarget};
use exec_server::protocol::process::{StartParams, TerminateMode};
use exec_server::registry::{
    RegistryAuth, RegistryConnectArgs, RegistryOptions, StaticKeys, identity,
};
use exec_server::remote::{self, RemoteEnvironmentConfig, RemoteStatus};
use exec_server::{
    CollectOptions, ExecBackend as _, ExecProcessEvent, ExecServer, ExecServerClient,
    ExecServerConfig,
};
use exec_server_client::{BoxFuture, NetworkPolicyDecider};
use exec_server_relay::keys::{MLKEM768_BYTES, PublicKey, SECURITY_PROFILE};
use exec_server_rendezvous::mailbox::MailboxBacklog;
use exec_server_rendezvous::signature::UrlSigner;
use exec_server_rendezvous::{
    EmbeddedStore, LocalRouter, RendezvousConfig, RendezvousParts, RendezvousServer, RouterLimits,
    Tokens,
};
use exec_server_testkit::proxy::TcpProxy;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use super::leaks::{fill_reused_buffers, leaves_nothing, no_objects_are_left, sh};
use super::{TIMEOUT, config, eventually, serially, served};

/// 2 MiB: more than a connection or a body route buffers.
const LARGE_BYTES: usize = 2 << 20;

/// Starts an HTTP server that answers `/small`, `/large` and `/endless` (which never ends), and
/// does not answer any other path.
async fn site() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream));
        }
    });
    address
}

/// Answers the requests of one connection until it ends.
async fn answer(mut stream: TcpStream) -> Option<()> {
    let zeros = vec![0; 64 * 1024];
    let mut seen = Vec::new();
    while stream.read_buf(&mut seen).await.ok()? > 0 {
        let Some(end) = seen.windows(4).position(|four| four == b"\r\n\r\n") else {
            continue;
        };
        let head = String::from_utf8_lossy(&seen[..end]).into_owned();
        let length = match head.split(' ').nth(1)? {
            "/small" => 5,
            "/large" => LARGE_BYTES,
            "/endless" => usize::MAX >> 1,
            _ => continue,
        };
        seen.clear();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.ok()?;
        let mut left = length;
        while left > 0 {
            let piece = &zeros[..left.min(zeros.len())];
            stream.write_all(piece).await.ok()?;
            left -= piece.len();
        }
    }
    Some(())
}

#[tokio::test]
async fn http_requests_leave_no_memory() {
    let _one = serially().await;
    let site = site().await;
    let url = |path: &str| HttpRequest::get(format!("http://{site}{path}"));
    let (server, client) = served(config()).await;
    leaves_nothing(40, async |_| {
        let small = client.fetch(url("/small")).await.unwrap();
        assert_eq!(small.body.len(), 5);
        let large = client.fetch(url("/large")).await.unwrap();
        assert_eq!(large.body.len(), LARGE_BYTES);
    })
    .await;
    no_objects_are_left(&server).await;
}

#[tokio::test]
async fn streamed_http_bodies_leave_no_memory() {
    let _one = serially().await;
    let site = site().await;
    let url = |path: &str| HttpRequest::get(format!("http://{site}{path}"));
    let (server, client) = served(config()).await;
    leaves_nothing(40, async |_| {
        let mut stream = client.open(url("/large")).await.unwrap();
        let mut received = 0;
        while let Some(piece) = stream.body.chunk().await.unwrap() {
            received += piece.len();
        }
        assert_eq!(received, LARGE_BYTES);
    })
    .await;
    no_objects_are_left(&server).await;
}

#[tokio::test]
async fn cancelled_http_requests_leave_no_memory() {
    let _one = serially().await;
    let site = site().await;
    let url = |path: &str| HttpRequest::get(format!("http://{site}{path}"));
    let (server, client) = served(config()).await;
    leaves_nothing(40, async |_| {
        // Bodies are cancelled while they arrive, read and unread.
        let mut stream = client.open(url("/endless")).await.unwrap();
        assert!(stream.body.chunk().await.unwrap().is_some());
        drop(stream);
        drop(client.open(url("/endless")).await.unwrap());
        // Requests are cancelled while the response is awaited, by the caller and by their own time
        // limit.
        let silent = client.fetch(url("/silent"));
        let cancelled = tokio::time::timeout(Duration::from_millis(5), silent).await;
        assert!(cancelled.is_err());
        let timed = HttpRequest {
            timeout: Some(Duration::from_millis(5)),
            ..url("/silent")
        };
        assert!(client.fetch(timed).await.is_err());
    })
    .await;
    no_objects_are_left(&server).await;
}

/// Client that answers a question in turn with yes, no and not at all.
#[derive(Debug)]
struct AllowingDecider {
    number: usize,
    asked: Arc<Semaphore>,
}

impl NetworkPolicyDecider for AllowingDecider {
    fn decide(&self, _: PolicyTarget) -> BoxFuture<'_, PolicyAnswer> {
        self.asked.add_permits(1);
        let number = self.number;
        Box::pin(async move {
            match number % 3 {
                0 => PolicyAnswer::Allow,
                1 => PolicyAnswer::Deny {
                    reason: "no".to_owned(),
                },
                _ => std::future::pending().await,
            }
        })
    }
}

#[tokio::test]
async fn network_policy_requests_leave_no_memory() {
    let _one = serially().await;
    let site = site().await;
    let config = ExecServerConfig {
        sandbox_launcher: Some(env!("CARGO_BIN_EXE_exec-server").into()),
        ..config()
    };
    let (server, client) = served(config).await;
    let proxy: NetworkProxy = serde_json::from_value(serde_json::json!({
        "proxy": {
            "enabled": true, "enableSocks5": true, "enableSocks5Udp": false, "mode": "full",
            "allowUpstreamProxy": false, "dangerouslyAllowAllUnixSockets": false,
            "allowLocalBinding": true, "domains": {},
        },
        "policyDecisionTimeoutMs": 60_000,
    }))
    .unwrap();
    let script = format!(
        "curl -s --noproxy '' -o /dev/null -w '%{{http_code}}' http://{site}/small; exit 0"
    );
    leaves_nothing(18, async |number| {
        let params = StartParams {
            network_proxy: Some(proxy.clone()),
            enforce_managed_network: true,
            ..sh(number, &script)
        };
        let asked = Arc::new(Semaphore::new(0));
        let decider = Arc::new(AllowingDecider {
            number,
            asked: Arc::clone(&asked),
        });
        let started = client.start_with_network_policy_decider(params, decider);
        let process = started.await.unwrap().process;
        asked.acquire().await.unwrap().forget();
        if number % 3 == 2 {
            // The question is open when its process ends.
            let ended = process.terminate(TerminateMode::Force, true);
            assert_eq!(ended.await.unwrap().gone, Some(true));
        } else {
            let output = process.output(CollectOptions::default()).await.unwrap();
            let code: &[u8] = if number % 3 == 0 { b"200" } else { b"403" };
            assert_eq!(output.stdout, code);
        }
    })
    .await;
    eventually("processes end", || match server.executor().live() {
        0 => Ok(()),
        count => Err(count),
    })
    .await;
    no_objects_are_left(&server).await;
}

/// Rendezvous server and one executor, both in this process.
struct Relay {
    url: String,
    /// Key pair of all clients: the executor remembers approved ones for some minutes.
    identity: StaticKeys,
    executor: ExecServer,
    _state: TempDir,
}

impl Relay {
    async fn start() -> Self {
        let state = tempfile::tempdir().unwrap();
        let backlog = Arc::new(MailboxBacklog::default());
        let mut limits = RouterLimits::default();
        // Ended streams stay reserved for their harnesses, up to 64 of them even longer.
        limits.memory = Duration::from_millis(1);
        let router = LocalRouter::new(limits, Arc::clone(&backlog));
        let tokens: Tokens = "machine executor machine-token\n\
             boss admin boss-token\n\
             alice harness alice-token\n"
            .parse()
            .unwrap();
        let parts = RendezvousParts {
            store: Arc::new(EmbeddedStore::open(&state.path().join("store")).unwrap()),
            router: Arc::new(router),
            backlog,
            signer: UrlSigner::new("s".repeat(32).into()).unwrap(),
            tokens,
            audit: None,
        };
        let rendezvous = RendezvousServer::new(RendezvousConfig::default(), parts);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { rendezvous.serve(listener, None).await });
        let auth = RegistryAuth::bearer("machine-token");
        let config = RemoteEnvironmentConfig::new(
            &url,
            "box",
            RegistryOptions::new(auth),
            identity::generate(),
        );
        let executor = ExecServer::new(super::config()).unwrap();
        let serving = executor.clone();
        let status = watch::Sender::new(RemoteStatus::Connecting);
        let mut attached = status.subscribe();
        tokio::spawn(async move { remote::serve(&serving, config, status).await });
        attached
            .wait_for(|status| *status == RemoteStatus::Attached)
            .await
            .unwrap();
        let relay = Self {
            url,
            identity: identity::generate(),
            executor,
            _state: state,
        };
        let client = ExecServerClient::connect_registry(relay.args(&relay.url))
            .await
            .unwrap();
        fill_reused_buffers(&relay.executor, &client).await;
        client.end_session().await.unwrap();
        relay
    }

    /// Arguments of a client that reaches the rendezvous server under this URL.
    fn args(&self, url: &str) -> RegistryConnectArgs {
        let auth = RegistryAuth::bearer("alice-token");
        let mut args = RegistryConnectArgs::new(url, "box", auth, "test");
        args.identity = self.identity.clone();
        // A session whose client disconnects without ending it expires soon.
        args.options.detach_grace = Some(Duration::from_millis(1));
        args
    }

    async fn is_idle(&self) {
        eventually("sessions end", || match self.executor.session_count() {
            0 => Ok(()),
            count => Err(count),
        })
        .await;
    }
}

#[tokio::test]
async fn relay_streams_leave_no_memory() {
    let _one = serially().await;
    let relay = Relay::start().await;
    leaves_nothing(24, async |number| {
        let client = ExecServerClient::connect_registry(relay.args(&relay.url))
            .await
            .unwrap();
        if number % 3 == 0 {
            // The client leaves while its command writes.
            let script = "exec cat /dev/zero";
            let process = client.start(sh(number, script)).await.unwrap().process;
            let mut events = process.events().unwrap();
            let first = events.recv().await.unwrap();
            assert!(
                matches!(first, ExecProcessEvent::Output { .. }),
                "{first:?}"
            );
            drop((events, process, client));
        } else {
            let script = "exec head -c 300000 /dev/zero";
            let process = client.start(sh(number, script)).await.unwrap().process;
            let output = process.output(CollectOptions::default()).await.unwrap();
            assert_eq!(output.stdout.len(), 300_000);
            drop(process);
            if number % 3 == 1 {
                client.end_session().await.unwrap();
            }
            drop(client);
        }
        relay.is_idle().await;
    })
    .await;
    no_objects_are_left(&relay.executor).await;
}

#[tokio::test]
async fn relay_streams_with_cut_sockets_leave_no_memory() {
    let _one = serially().await;
    let relay = Relay::start().await;
    let proxy = TcpProxy::start(&relay.url.replace("http://", "ws://")).await;
    let url = proxy.url().replace("ws://", "http://");
    leaves_nothing(16, async |number| {
        let mut args = relay.args(&url);
        args.options.detach_grace = Some(TIMEOUT);
        let client = ExecServerClient::connect_registry(args).await.unwrap();
        let script = "for i in 1 2 3; do head -c 200000 /dev/zero; read line; done";
        let params = StartParams {
            pipe_stdin: true,
            ..sh(number, script)
        };
        let process = client.start(params).await.unwrap().process;
        let mut events = process.events().unwrap();
        let mut received = 0;
        while received < 600_000 {
            match events.recv().await.unwrap() {
                ExecProcessEvent::Output { chunk, .. } => received += chunk.len(),
                ExecProcessEvent::Failed(failure) => panic!("{failure}"),
                _ => {}
            }
            if received % 200_000 == 0 {
                proxy.cut();
                process.write("\n".into()).await.unwrap();
            }
        }
        drop((events, process));
        client.end_session().await.unwrap();
        drop(client);
        relay.is_idle().await;
    })
    .await;
    no_objects_are_left(&relay.executor).await;
}

/// Sends a request to the rendezvous server on a connection of its own; the response must be 200.
async fn post(url: &str, token: &str, path: &str, body: &str) {
    let address = url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.unwrap();
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         Authorization: Bearer {token}\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
}

#[tokio::test]
async fn registered_and_removed_environments_leave_no_memory() {
    let _one = serially().await;
    let relay = Relay::start().await;
    let key = PublicKey::new([7; 32], &[7; MLKEM768_BYTES]).unwrap();
    let body = serde_json::json!({
        "security_profile": SECURITY_PROFILE, "executor_public_key": key,
    })
    .to_string();
    leaves_nothing(40, async |number| {
        let path = |call: &str| format!("/cloud/environment/env{number}/{call}");
        post(&relay.url, "machine-token", &path("register"), &body).await;
        post(&relay.url, "boss-token", &path("remove"), "{}").await;
    })
    .await;
}
