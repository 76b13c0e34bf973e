//! Connections through a rendezvous server compared with direct ones: connecting, keystrokes,
//! output, concurrent streams and cuts.
//!
//! The peer has no local rendezvous server, so the server under test is compared with itself: the
//! same client library and processes over a websocket instead of a relay stream.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use exec_server_client::protocol::process::StartParams;
use exec_server_client::registry::{RegistryAuth, RegistryConnectArgs};
use exec_server_client::{
    ExecBackend as _, ExecProcess, ExecProcessEvent, ExecProcessEvents, ExecServerClient,
    RemoteExecServerConnectArgs,
};
use exec_server_registry::identity;
use exec_server_relay::noise::{Finished, Initiator, Responder, prologue};
use exec_server_sync::Mutex;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::Notify;

use super::{Bench, RowSpec, size};
use crate::floor::{self, ECHO};
use crate::pattern::BytePattern;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::{BenchServer, CommandLine, StartedProgram};
use crate::stats::percentile;

const ENVIRONMENT: &str = "bench";

/// Rendezvous server, executor and direct server.
pub(crate) struct RelaySetup {
    pub(crate) runtime: Runtime,
    pub(crate) registry: RegistryConnectArgs,
    /// The same address through a forwarder that can be cut.
    cuttable: RegistryConnectArgs,
    wire: CuttableForwarder,
    pub(crate) direct: RemoteExecServerConnectArgs,
    secure: RemoteExecServerConnectArgs,
    /// Fields are dropped in this order.
    pub(crate) executor: StartedProgram,
    pub(crate) server: BenchServer,
    pub(crate) rendezvous: StartedProgram,
    _files: TempDir,
}

impl RelaySetup {
    fn new(command: &CommandLine) -> anyhow::Result<Self> {
        Self::with_options(command, &[])
    }

    /// Like [`RelaySetup::new`], with more options for the server that is reached directly.
    pub(crate) fn with_options(command: &CommandLine, options: &[&str]) -> anyhow::Result<Self> {
        let files = tempfile::tempdir()?;
        let path = |name: &str| files.path().join(name).display().to_string();
        let state = path("rendezvous");
        let rendezvous = [
            "rendezvous",
            "--listen",
            "127.0.0.1:0",
            "--state-dir",
            &state,
        ];
        let rendezvous = StartedProgram::start(command, &rendezvous)?;
        let url = rendezvous.line.clone();
        let address: SocketAddr = url
            .strip_prefix("http://")
            .and_then(|address| address.trim_end_matches('/').parse().ok())
            .with_context(|| format!("the rendezvous server printed `{url}`"))?;
        let token = |role: &str| format!("{state}/{role}.token");
        let (executor, identity) = (token("executor"), path("identity"));
        let executor = [
            "--remote",
            &url,
            "--environment-id",
            ENVIRONMENT,
            "--remote-token-file",
            &executor,
            "--identity-file",
            &identity,
        ];
        let executor = StartedProgram::start(command, &executor)?;
        let (cert, key) = (path("cert.pem"), path("key.pem"));
        let listen = [
            "--listen",
            "wss://127.0.0.1:0",
            "--tls-self-signed",
            "--tls-cert",
            &cert,
            "--tls-key",
            &key,
        ];
        let mut server = BenchServer::start_with(command, &[&listen, options].concat())?;
        let secure = server.next_address("wss://")?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let wire = runtime.block_on(CuttableForwarder::new(address))?;
        let auth = RegistryAuth::BearerFile(token("harness").into());
        let registry =
            |url: String| RegistryConnectArgs::new(url, ENVIRONMENT, auth.clone(), "bench");
        let direct = |url: String| RemoteExecServerConnectArgs::new(url, "bench");
        let mut secure = direct(format!("wss://{secure}"));
        secure.tls.ca_file = Some(cert.into());
        Ok(Self {
            registry: registry(url),
            cuttable: registry(format!("http://{}", wire.address)),
            direct: direct(format!("ws://{}", server.address)),
            secure,
            wire,
            runtime,
            executor,
            server,
            rendezvous,
            _files: files,
        })
    }

    fn through_relay(&self) -> anyhow::Result<ExecServerClient> {
        let args = self.registry.clone();
        Ok(self
            .runtime
            .block_on(ExecServerClient::connect_registry(args))?)
    }

    fn directly(&self, args: &RemoteExecServerConnectArgs) -> anyhow::Result<ExecServerClient> {
        Ok(self
            .runtime
            .block_on(ExecServerClient::connect(args.clone()))?)
    }
}

/// TCP forwarder that can cut its connections.
pub(crate) struct CuttableForwarder {
    pub(crate) address: SocketAddr,
    open: Arc<Mutex<Vec<Arc<Notify>>>>,
}

impl CuttableForwarder {
    pub(crate) async fn new(to: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let open = Arc::<Mutex<Vec<Arc<Notify>>>>::default();
        let cuts = Arc::clone(&open);
        // Ends with the runtime.
        tokio::spawn(async move {
            while let Ok((mut here, _)) = listener.accept().await {
                let cut = Arc::new(Notify::new());
                cuts.lock().push(Arc::clone(&cut));
                tokio::spawn(async move {
                    let Ok(mut there) = TcpStream::connect(to).await else {
                        return;
                    };
                    let _ = (here.set_nodelay(true), there.set_nodelay(true));
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut here, &mut there) => {}
                        () = cut.notified() => {}
                    }
                });
            }
        });
        Ok(Self { address, open })
    }

    pub(crate) fn cut(&self) {
        let mut open = self.open.lock();
        for connection in open.drain(..) {
            connection.notify_one();
        }
    }
}

/// A terminal that echoes what is typed.
pub(crate) struct Terminal {
    process: Arc<dyn ExecProcess>,
    events: ExecProcessEvents,
}

impl Terminal {
    pub(crate) async fn start(client: &ExecServerClient, name: &str) -> anyhow::Result<Self> {
        let params = StartParams {
            tty: true,
            ..params(name, &ECHO)
        };
        let process = client.start(params).await?.process;
        let events = process.events()?;
        let mut terminal = Self { process, events };
        terminal.echo().await?;
        for _ in 0..20 {
            terminal.key().await?;
        }
        Ok(terminal)
    }

    /// Seconds from a key to its echo.
    pub(crate) async fn key(&mut self) -> anyhow::Result<f64> {
        let start = Instant::now();
        self.process.write("x".into()).await?;
        self.echo().await?;
        Ok(start.elapsed().as_secs_f64())
    }

    async fn echo(&mut self) -> anyhow::Result<()> {
        loop {
            match self.events.recv().await {
                Some(ExecProcessEvent::Output { .. }) => return Ok(()),
                Some(ExecProcessEvent::Failed(failure)) => return Err(failure.into()),
                Some(_) => {}
                None => anyhow::bail!("the terminal ended"),
            }
        }
    }

    pub(super) async fn keys(&mut self, count: usize) -> anyhow::Result<Vec<f64>> {
        let mut samples = Vec::with_capacity(count);
        for _ in 0..count {
            samples.push(self.key().await?);
        }
        Ok(samples)
    }
}

fn params(name: &str, argv: &[&str]) -> StartParams {
    StartParams {
        process_id: name.to_owned(),
        argv: argv.iter().map(|word| (*word).to_owned()).collect(),
        env: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
        pipe_stdin: true,
        ..StartParams::default()
    }
}

/// Returns a process id that is unique in this run.
pub(crate) fn name() -> String {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    format!("bench-{number}")
}

/// Bytes per second of the pattern; every byte is checked.
pub(super) async fn stream(
    bench: &Bench,
    client: &ExecServerClient,
    pattern: &BytePattern,
    total: u64,
) -> anyhow::Result<f64> {
    let own = bench.own.display().to_string();
    let start = Instant::now();
    let argv = [own.as_str(), "--emit-pattern", &total.to_string()];
    let process = client.start(params(&name(), &argv)).await?.process;
    let mut events = process.events()?;
    let mut offset = 0;
    while offset < total {
        match events.recv().await {
            Some(ExecProcessEvent::Output { chunk, .. }) => {
                ensure!(
                    pattern.matches(offset, &chunk),
                    "wrong bytes after {offset}"
                );
                offset += chunk.len() as u64;
            }
            Some(ExecProcessEvent::Failed(failure)) => return Err(failure.into()),
            Some(_) => {}
            None => anyhow::bail!("the output ended after {offset} of {total} bytes"),
        }
    }
    Ok(total as f64 / start.elapsed().as_secs_f64())
}

pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let connects = bench.pick(40, 20);
    let keys = bench.pick(400, 200);
    let cuts = bench.pick(15, 5);
    let total: u64 = bench.pick(256 << 20, 64 << 20);
    let pattern = BytePattern::new();
    let line = |name: &str, unit, base, goals| RowSpec {
        name: format!("relay: {name}"),
        unit,
        base,
        goals,
    };
    let value = |limit| Goal::Value { limit, aim: limit };
    let base = |limit| Goal::Base { limit, aim: limit };
    let lines = vec![
        line(
            "connect to initialized p50",
            Unit::Seconds,
            "",
            vec![value(8e-3)],
        ),
        line(
            "cryptography of a handshake, both ends, p50",
            Unit::Seconds,
            "",
            vec![value(1.5e-3)],
        ),
        line("echo p50", Unit::Seconds, "direct", vec![base(3.0)]),
        line(
            &format!("stream {}", size(total)),
            Unit::BytesPerSecond,
            "direct wss",
            vec![value(150.0 * 1024.0 * 1024.0), base(0.4)],
        ),
        line(
            "seven echoes beside a bulk stream p50",
            Unit::Seconds,
            "alone",
            vec![base(3.0)],
        ),
        line(
            "cut socket to the next echo p50",
            Unit::Seconds,
            "",
            vec![value(0.1)],
        ),
    ];
    bench.alone(bench.pick(5, 3), lines, RelaySetup::new, |setup| {
        let mut samples = Vec::with_capacity(connects);
        for _ in 0..connects {
            let start = Instant::now();
            drop(setup.through_relay()?);
            samples.push(start.elapsed().as_secs_f64());
            floor::pause();
        }
        let connect = percentile(&samples, 50.0);

        let relayed = setup.through_relay()?;
        let direct = setup.directly(&setup.direct)?;
        let echo = |client: &ExecServerClient| -> anyhow::Result<f64> {
            setup.runtime.block_on(async {
                let mut terminal = Terminal::start(client, &name()).await?;
                Ok(percentile(&terminal.keys(keys).await?, 50.0))
            })
        };
        let (direct_echo, relayed_echo) = (echo(&direct)?, echo(&relayed)?);

        let secure = setup.directly(&setup.secure)?;
        let run = |client: &ExecServerClient| {
            setup
                .runtime
                .block_on(stream(bench, client, &pattern, total))
        };
        let (direct_rate, relayed_rate) = (run(&secure)?, run(&relayed)?);

        let echoes_beside_a_flood = echoes_beside_a_flood(bench, setup, keys / 4)?;
        let after_cut = after_cuts(setup, cuts)?;
        Ok(vec![
            Figure::plain(connect),
            Figure::plain(percentile(&handshakes(connects)?, 50.0)),
            Figure::against(relayed_echo, direct_echo),
            Figure::against(relayed_rate, direct_rate),
            echoes_beside_a_flood,
            Figure::plain(after_cut),
        ])
    })
}

/// Seconds that one thread needs for both ends of a handshake.
fn handshakes(count: usize) -> anyhow::Result<Vec<f64>> {
    let [harness, executor] = [(); 2].map(|()| identity::generate());
    let prologue = prologue(ENVIRONMENT, "registration", "stream");
    // No real randomness is needed: these keys protect nothing.
    let mut next = 0_u8;
    let mut random = |out: &mut [u8]| {
        for byte in out {
            next = next.wrapping_mul(5).wrapping_add(1);
            *byte = next;
        }
    };
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        let key = executor.public_key();
        let (mut initiator, first) =
            Initiator::start(&harness, key, &prologue, b"authorization", &mut random)?;
        let (responder, _) = Responder::read(&executor, &prologue, &first, &mut random)?;
        let (there, second) = responder.reply()?;
        let Finished::Channel(here) = initiator.finish(&second)? else {
            anyhow::bail!("the executor was rejected");
        };
        samples.push(start.elapsed().as_secs_f64());
        ensure!(here.hash == there.hash, "the handshake hashes differ");
    }
    Ok(samples)
}

/// Echoes of seven terminals on their own streams, alone and while an eighth stream is flooded.
fn echoes_beside_a_flood(bench: &Bench, setup: &RelaySetup, keys: usize) -> anyhow::Result<Figure> {
    let clients: Vec<_> = (0..7)
        .map(|_| setup.through_relay())
        .collect::<anyhow::Result<_>>()?;
    let bulk = setup.through_relay()?;
    let own = bench.own.display().to_string();
    setup.runtime.block_on(async {
        let mut terminals = Vec::new();
        for client in &clients {
            terminals.push(Terminal::start(client, &name()).await?);
        }
        let alone = type_all(&mut terminals, keys).await?;
        let endless = u64::MAX.to_string();
        let argv = [own.as_str(), "--emit-pattern", &endless];
        let flood = bulk.start(params(&name(), &argv)).await?.process;
        let mut events = flood.events()?;
        let mut flooded = 0_usize;
        let drain = async {
            while let Some(event) = events.recv().await {
                if let ExecProcessEvent::Output { chunk, .. } = event {
                    flooded += chunk.len();
                }
            }
            anyhow::bail!("the flood ended")
        };
        let busy = tokio::select! {
            busy = type_all(&mut terminals, keys) => busy?,
            ended = drain => ended?,
        };
        ensure!(flooded > 0, "the flood does not come");
        // Discarding stops the flood before the next measurement. The response to the request comes
        // after output that was not read yet.
        let discard = async {
            while events.recv().await.is_some() {}
            std::future::pending::<()>().await;
        };
        tokio::select! {
            ended = bulk.end_session() => ended?,
            () = discard => {}
        }
        for client in &clients {
            client.end_session().await?;
        }
        Ok(Figure::against(
            percentile(&busy, 50.0),
            percentile(&alone, 50.0),
        ))
    })
}

/// Types into all terminals in turns.
async fn type_all(terminals: &mut [Terminal], keys: usize) -> anyhow::Result<Vec<f64>> {
    let mut samples = Vec::with_capacity(keys * terminals.len());
    for _ in 0..keys {
        for terminal in &mut *terminals {
            samples.push(terminal.key().await?);
        }
    }
    Ok(samples)
}

/// Seconds from cutting a socket to the echo of a key that is typed then.
fn after_cuts(setup: &RelaySetup, count: usize) -> anyhow::Result<f64> {
    let args = setup.cuttable.clone();
    setup.runtime.block_on(async {
        let client = ExecServerClient::connect_registry(args).await?;
        let session = client.session_id().to_owned();
        let mut terminal = Terminal::start(&client, &name()).await?;
        let mut samples = Vec::with_capacity(count);
        for _ in 0..count {
            setup.wire.cut();
            samples.push(terminal.key().await?);
            // After several cuts in a row the client waits before it reconnects, which is not
            // measured here.
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        ensure!(client.session_id() == session, "another session");
        Ok(percentile(&samples, 50.0))
    })
}
