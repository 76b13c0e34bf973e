//! Rendezvous server with thousands of connections: its memory, the latency of active streams, and
//! the time until streams continue after it is killed and restarted.
//!
//! The idle connections are websockets that send relay frames only, many of them in this process.
//! The streams that survive the restart are real ones, with keys and acknowledgements.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use exec_server_registry::auth::RegistryAuth;
use exec_server_registry::relay::{self, ExecutorAttachment, RelayDialError, RelayStream};
use exec_server_registry::{Registry, RegistryOptions};
use exec_server_relay::frame::{Acks, FrameBody, Transmit, decode};
use exec_server_relay::keys::{MLKEM768_BYTES, PublicKey};
use exec_server_relay::noise::{SEED_BYTES, StaticKeys};
use exec_server_relay::{EndpointLimits, RelayExecutorConfig, RelayHarnessConfig};
use exec_server_transport::link::{Link, RawEvent};
use exec_server_transport::{ConnectOptions, connect};
use rustix::process::Pid;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{Bench, RowSpec};
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::{CommandLine, StartedProgram};
use crate::stats::percentile;

/// Time limit of everything that is not measured.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Concurrent calls of the registry.
const CONCURRENT_CALLS: usize = 32;

/// Pause between two messages of one active stream.
const PAUSE: Duration = Duration::from_millis(100);

/// A rendezvous server that can be killed and restarted.
pub(super) struct RestartableRendezvous {
    command: CommandLine,
    files: TempDir,
    address: String,
    program: Option<StartedProgram>,
    tokens: [String; 2],
    runtime: Runtime,
}

impl RestartableRendezvous {
    pub(super) fn new(command: &CommandLine) -> anyhow::Result<Self> {
        // The port is released here and bound by the server; it stays the same after a restart.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let mut server = Self {
            command: command.clone(),
            files: tempfile::tempdir()?,
            address,
            program: None,
            tokens: Default::default(),
            runtime: tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?,
        };
        server.start()?;
        for (token, role) in server.tokens.iter_mut().zip(["executor", "harness"]) {
            let file = server.files.path().join(format!("{role}.token"));
            *token = std::fs::read_to_string(file)?.trim().to_owned();
        }
        Ok(server)
    }

    fn start(&mut self) -> anyhow::Result<()> {
        let state = self.files.path().display().to_string();
        let arguments = [
            "rendezvous",
            "--listen",
            &self.address,
            "--state-dir",
            &state,
        ];
        self.program = Some(StartedProgram::start(&self.command, &arguments)?);
        Ok(())
    }

    fn resident(&self) -> anyhow::Result<u64> {
        let program = self
            .program
            .as_ref()
            .context("the rendezvous server does not run")?;
        program.resident_at_rest()
    }

    /// Registers and attaches this many executors, which stay attached until they are dropped.
    pub(super) fn attach(&self, count: usize) -> anyhow::Result<Vec<Link>> {
        self.runtime.block_on(attach(&self.access(), count))
    }

    /// Number of open descriptors of the server.
    pub(super) fn descriptors(&self) -> anyhow::Result<usize> {
        let path = format!("/proc/{}/fd", self.pid()?.as_raw_nonzero());
        Ok(std::fs::read_dir(path)?.count())
    }

    /// Waits until the server has no more open descriptors than this.
    pub(super) fn wait_for_descriptors(&self, count: usize) -> anyhow::Result<()> {
        let start = Instant::now();
        while self.descriptors()? > count {
            ensure!(start.elapsed() < TIME_LIMIT, "connections are still open");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    pub(super) fn pid(&self) -> anyhow::Result<Pid> {
        let program = self.program.as_ref();
        Ok(program
            .context("the rendezvous server does not run")?
            .own_pid())
    }

    fn access(&self) -> RegistryAccess {
        RegistryAccess {
            url: format!("http://{}", self.address),
            executor: self.tokens[0].clone(),
            harness: self.tokens[1].clone(),
        }
    }
}

/// URL and tokens of a registry.
#[derive(Clone)]
pub(super) struct RegistryAccess {
    pub(super) url: String,
    pub(super) executor: String,
    pub(super) harness: String,
}

impl RegistryAccess {
    pub(super) fn registry(&self, environment: &str, token: &str) -> anyhow::Result<Registry> {
        let mut options = RegistryOptions::new(RegistryAuth::bearer(token.to_owned()));
        options.timeout = TIME_LIMIT;
        Ok(Registry::new(&self.url, environment, options)?)
    }
}

async fn dial(url: &str) -> anyhow::Result<Link> {
    Ok(connect(url, &ConnectOptions::default()).await?)
}

/// A key that a rendezvous server accepts; it is never used.
pub(super) fn key() -> anyhow::Result<PublicKey> {
    PublicKey::new([1; 32], &[2; MLKEM768_BYTES]).context("no key")
}

async fn send(link: &mut Link, frame: &Transmit) -> anyhow::Result<()> {
    link.outgoing.push_binary(frame.parts());
    Ok(link.outgoing.flush().await?)
}

/// Passes frames to `act` until it returns a value; responds to pings meanwhile.
async fn next<T>(
    link: &mut Link,
    mut act: impl FnMut(&FrameBody<'_>) -> Option<T>,
) -> anyhow::Result<T> {
    loop {
        let mut pong = None;
        match link.incoming.recv_raw().await? {
            Some(RawEvent::Message { bytes, .. }) => {
                if let Some(done) = act(&decode(bytes)?.body) {
                    return Ok(done);
                }
            }
            Some(RawEvent::Ping(payload)) => pong = Some(payload.to_vec()),
            Some(RawEvent::Pong) => {}
            None => bail!("the rendezvous server closed the connection"),
        }
        if let Some(payload) = pong {
            link.outgoing.push_pong(&payload);
            link.outgoing.flush().await?;
        }
    }
}

/// Executor that echoes frames, until its task ends.
pub(super) async fn echo(mut link: Link) -> anyhow::Result<()> {
    enum ReceivedNumber {
        Handshake,
        Data(u32, Vec<u8>),
    }
    let stream = "s";
    loop {
        let received = next(&mut link, |body| match body {
            FrameBody::Handshake { .. } => Some(ReceivedNumber::Handshake),
            FrameBody::Data { seq, payload } => Some(ReceivedNumber::Data(*seq, payload.to_vec())),
            _ => None,
        });
        let frame = match received.await? {
            ReceivedNumber::Handshake => {
                Transmit::handshake(stream, Acks::default(), b"hello"[..].into())
            }
            ReceivedNumber::Data(seq, payload) => {
                Transmit::data(stream, Acks::default(), seq, payload.into())
            }
        };
        send(&mut link, &frame).await?;
    }
}

/// Opens a harness's stream.
async fn open_stream(mut link: Link) -> anyhow::Result<Link> {
    let stream = "s";
    send(&mut link, &Transmit::resume(stream, Acks::default(), 0)).await?;
    let hello = Transmit::handshake(stream, Acks::default(), b"hello"[..].into());
    send(&mut link, &hello).await?;
    next(&mut link, |body| {
        matches!(body, FrameBody::Handshake { .. }).then_some(())
    })
    .await?;
    Ok(link)
}

/// Seconds from a frame to its echo, `count` times, with pauses.
async fn measure_echoes(
    mut link: Link,
    count: u32,
    offset: Duration,
) -> anyhow::Result<(Link, Vec<f64>)> {
    let mut samples = Vec::with_capacity(count as usize);
    tokio::time::sleep(offset).await;
    for seq in 0..count {
        let frame = Transmit::data("s", Acks::default(), seq, vec![7; 100].into());
        let start = Instant::now();
        send(&mut link, &frame).await?;
        next(&mut link, |body| match body {
            FrameBody::Data { seq: received, .. } if *received == seq => Some(()),
            _ => None,
        })
        .await?;
        samples.push(start.elapsed().as_secs_f64());
        tokio::time::sleep(PAUSE).await;
    }
    Ok((link, samples))
}

/// Connected executors and harnesses.
struct ConnectedPairs {
    /// Executors, which end when this is dropped.
    _executors: JoinSet<anyhow::Result<()>>,
    harnesses: Vec<Link>,
}

/// Runs `act` for each of `count` environments, several concurrently, and returns the results.
async fn for_each<T, F>(count: usize, mut act: impl FnMut(usize) -> F) -> anyhow::Result<Vec<T>>
where
    T: Send + 'static,
    F: Future<Output = anyhow::Result<T>> + Send + 'static,
{
    let mut done = Vec::with_capacity(count);
    let mut tasks = JoinSet::new();
    for index in 0..count {
        if tasks.len() >= CONCURRENT_CALLS {
            let joined = tasks.join_next().await.context("a task")?;
            done.push(joined??);
        }
        tasks.spawn(act(index));
    }
    while let Some(joined) = tasks.join_next().await {
        done.push(joined??);
    }
    Ok(done)
}

/// Registers and attaches `count` executors.
async fn attach(access: &RegistryAccess, count: usize) -> anyhow::Result<Vec<Link>> {
    for_each(count, |index| {
        let access = access.clone();
        async move {
            let environment = format!("pairs-{index}");
            let registry = access.registry(&environment, &access.executor)?;
            let registered = registry.register(&key()?, None).await?;
            dial(&registered.url).await
        }
    })
    .await
}

impl ConnectedPairs {
    /// Connects `count` executors and a harness to each, and opens the streams of `count / 10`.
    async fn new(access: &RegistryAccess, count: usize) -> anyhow::Result<Self> {
        let mut executors = JoinSet::new();
        for link in attach(access, count).await? {
            executors.spawn(echo(link));
        }
        let enter = |index: usize| {
            let access = access.clone();
            async move {
                let environment = format!("pairs-{index}");
                let registry = access.registry(&environment, &access.harness)?;
                let answer = registry.connect(&key()?).await?;
                dial(&answer.url).await
            }
        };
        let harnesses = for_each(count, enter).await?;
        Ok(Self {
            _executors: executors,
            harnesses,
        })
    }

    /// Opens the streams of the first `count` harnesses and sends on all of them concurrently.
    async fn measure_echoes(&mut self, active: usize, count: u32) -> anyhow::Result<Vec<f64>> {
        let mut talking = JoinSet::new();
        for (index, link) in self.harnesses.drain(..active).enumerate() {
            // Spread over the pause, so that they do not send at the same moment.
            let offset = PAUSE * u32::try_from(index).unwrap_or(0) / u32::try_from(active)?;
            talking.spawn(
                async move { measure_echoes(open_stream(link).await?, count, offset).await },
            );
        }
        let mut samples = Vec::new();
        while let Some(joined) = talking.join_next().await {
            let (link, mut more) = joined??;
            samples.append(&mut more);
            self.harnesses.push(link);
        }
        Ok(samples)
    }
}

/// A reliable executor that echoes messages.
async fn serve(
    access: &RegistryAccess,
    environment: String,
    seed: u8,
) -> anyhow::Result<StaticKeys> {
    let identity = || StaticKeys::from_seed(&[seed; SEED_BYTES]);
    let registry = Arc::new(access.registry(&environment, &access.executor)?);
    let registered = registry.register(identity().public_key(), None).await?;
    let registration = registered.executor_registration_id;
    let config = RelayExecutorConfig {
        environment_id: environment,
        registration_id: registration.clone(),
        identity: identity(),
        limits: EndpointLimits::default(),
    };
    let (accepted, mut streams) = mpsc::channel::<RelayStream>(64);
    let (url, urls) = (registered.url, registered.urls);
    // Both end with the runtime.
    tokio::spawn(async move {
        let dial = move || {
            let (url, urls, registration_id) = (url.clone(), urls.clone(), registration.clone());
            let registry = Arc::clone(&registry);
            async move {
                let link = registry
                    .dial_any(&url, &urls, TIME_LIMIT)
                    .await
                    .map_err(|error| RelayDialError::passing(error.to_string()))?;
                Ok(ExecutorAttachment {
                    link,
                    registration_id,
                    cut: Default::default(),
                })
            }
        };
        relay::serve(config, dial, |_| async { Ok(()) }, accepted).await
    });
    tokio::spawn(async move {
        while let Some(mut stream) = streams.recv().await {
            tokio::spawn(async move {
                while let Ok(Some(RawEvent::Message { bytes, .. })) =
                    stream.link.incoming.recv_raw().await
                {
                    let message = bytes.to_vec();
                    let outgoing = &mut stream.link.outgoing;
                    outgoing.push_message(message.len(), |out| out.extend_from_slice(&message));
                    if outgoing.flush().await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    Ok(identity())
}

/// A reliable stream that sends numbers and checks that each comes back once and in order.
async fn number_stream(
    access: RegistryAccess,
    environment: String,
    executor: PublicKey,
    progress: Arc<[AtomicU64; 2]>,
) -> anyhow::Result<()> {
    let mut seed = [0; SEED_BYTES];
    for (byte, random) in seed.iter_mut().zip(std::iter::repeat_with(random)) {
        *byte = random;
    }
    let identity = StaticKeys::from_seed(&seed);
    let public = identity.public_key().clone();
    let registry = Arc::new(access.registry(&environment, &access.harness)?);
    let first = registry.connect(&public).await?;
    let config = RelayHarnessConfig {
        environment_id: environment,
        registration_id: first.executor_registration_id,
        stream_id: format!("{:016x}", u64::from_le_bytes(seed[..8].try_into()?)),
        executor,
        authorization: first.harness_key_authorization,
        identity,
        limits: EndpointLimits::default(),
    };
    let dial = move || {
        let (registry, public) = (Arc::clone(&registry), public.clone());
        async move {
            let passing = |error: anyhow::Error| RelayDialError::passing(error.to_string());
            let answer = registry.connect(&public).await;
            let answer = answer.map_err(|error| passing(error.into()))?;
            let dialled = registry.dial_any(&answer.url, &answer.urls, TIME_LIMIT);
            dialled.await.map_err(|error| passing(error.into()))
        }
    };
    let mut stream = relay::open(config, dial).await?;
    let mut ticks = tokio::time::interval(Duration::from_millis(20));
    let (mut sent, mut received) = (0_u64, 0_u64);
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                let mut message = sent.to_le_bytes().to_vec();
                message.resize(100, 7);
                let outgoing = &mut stream.link.outgoing;
                outgoing.push_message(message.len(), |out| out.extend_from_slice(&message));
                outgoing.flush().await?;
                sent += 1;
                progress[0].store(sent, Ordering::Relaxed);
            }
            event = stream.link.incoming.recv_raw() => {
                let Some(event) = event? else {
                    bail!("a stream ended after {received} of {sent} messages");
                };
                if let RawEvent::Message { bytes, .. } = event {
                    let number = bytes.get(..8).context("a short message")?;
                    let number = u64::from_le_bytes(number.try_into()?);
                    ensure!(number == received, "message {number} came instead of {received}");
                    received += 1;
                    progress[1].store(received, Ordering::Relaxed);
                }
            }
        }
    }
}

/// A random byte; need not be unpredictable.
fn random() -> u8 {
    use std::hash::{BuildHasher as _, Hasher as _};
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish() as u8
}

/// Streams of numbers, and executors that echo them.
pub(super) struct CounterStreams {
    streams: JoinSet<anyhow::Result<()>>,
    progress: Vec<Arc<[AtomicU64; 2]>>,
}

impl CounterStreams {
    /// Opens `count_streams` streams; executors and harnesses connect to each of `registries` in
    /// turn.
    pub(super) async fn new(
        access: &[RegistryAccess],
        count_streams: usize,
    ) -> anyhow::Result<Self> {
        const EXECUTORS: usize = 20;
        let mut streams = JoinSet::new();
        let progress: Vec<Arc<[AtomicU64; 2]>> =
            (0..count_streams).map(|_| Arc::default()).collect();
        let mut executors = Vec::new();
        for (index, access) in (0..EXECUTORS).zip(access.iter().cycle()) {
            let environment = format!("reliable-{index}");
            let seed = u8::try_from(index + 1)?;
            let identity = serve(access, environment.clone(), seed).await?;
            executors.push((environment, identity.public_key().clone()));
        }
        for (index, progress) in progress.iter().enumerate() {
            let (environment, key) = executors[index % EXECUTORS].clone();
            // Every executor gets streams from every node.
            let access = access[(index / EXECUTORS + index) % access.len()].clone();
            streams.spawn(number_stream(
                access,
                environment,
                key,
                Arc::clone(progress),
            ));
        }
        let mut counters = Self { streams, progress };
        counters
            .wait(&vec![3; count_streams])
            .await
            .context("not all streams were opened")?;
        Ok(counters)
    }

    /// Returns the number for each stream whose echo proves that the stream works from now on.
    pub(super) fn marks(&self) -> Vec<u64> {
        let sent = |progress: &Arc<[AtomicU64; 2]>| progress[0].load(Ordering::Relaxed) + 1;
        self.progress.iter().map(sent).collect()
    }

    /// Waits until each stream has received more than its mark.
    pub(super) async fn wait(&mut self, marks: &[u64]) -> anyhow::Result<()> {
        let past = all_past(&self.progress, marks, &mut self.streams);
        timeout(TIME_LIMIT, past)
            .await
            .context("the time limit passed")?
    }
}

/// Kills and restarts the server; returns the seconds until each of `count_streams` streams has
/// received an echo of something it sent afterwards.
fn restart(server: &mut RestartableRendezvous, count_streams: usize) -> anyhow::Result<f64> {
    let access = [server.access()];
    let handle = server.runtime.handle().clone();
    let mut counters = handle.block_on(CounterStreams::new(&access, count_streams))?;
    server
        .program
        .take()
        .context("the rendezvous server does not run")?
        .kill();
    let died = Instant::now();
    let marks = counters.marks();
    server.start()?;
    let waited = handle.block_on(counters.wait(&marks));
    waited.context("not all streams continued")?;
    Ok(died.elapsed().as_secs_f64())
}

/// Waits until each stream has received more than its mark; fails when one has failed.
async fn all_past(
    progress: &[Arc<[AtomicU64; 2]>],
    marks: &[u64],
    streams: &mut JoinSet<anyhow::Result<()>>,
) -> anyhow::Result<()> {
    loop {
        if let Some(ended) = streams.try_join_next() {
            ended??;
        }
        let past = progress
            .iter()
            .zip(marks)
            .all(|(progress, mark)| progress[1].load(Ordering::Relaxed) > *mark);
        if past {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    const MIB: f64 = 1024.0 * 1024.0;
    let pairs = bench.pick(2000, 200);
    let active = bench.pick(200, 20);
    let messages = bench.pick(50, 20);
    let streams = bench.pick(200, 40);
    let name = format!("rendezvous server, {pairs} executors and {pairs} harnesses");
    let line = |name: String, unit, goals| RowSpec {
        name,
        unit,
        base: "",
        goals,
    };
    let value = |limit| Goal::Value { limit, aim: limit };
    let lines = vec![
        line(
            format!("{name}: memory"),
            Unit::Bytes,
            vec![value(400.0 * MIB)],
        ),
        line(
            format!("{name}: memory of each pair"),
            Unit::Bytes,
            Vec::new(),
        ),
        line(format!("{name}: attached"), Unit::PerSecond, Vec::new()),
        line(
            format!("{name}: echo of {active} p99"),
            Unit::Seconds,
            vec![value(10e-3)],
        ),
        line(
            format!("rendezvous server killed under {streams} streams: all continue"),
            Unit::Seconds,
            vec![value(5.0)],
        ),
    ];
    bench.alone(1, lines, RestartableRendezvous::new, |server| {
        let before = server.resident()?;
        let access = server.access();
        let start = Instant::now();
        let mut all = server
            .runtime
            .block_on(ConnectedPairs::new(&access, pairs))?;
        let rate = 2.0 * pairs as f64 / start.elapsed().as_secs_f64();
        let samples = server
            .runtime
            .block_on(all.measure_echoes(active, messages))?;
        let echo = percentile(&samples, 99.0);
        let after = server.resident()?;
        drop(all);
        let restarted = restart(server, streams)?;
        Ok(vec![
            Figure::plain(after as f64),
            Figure::plain((after as f64 - before as f64) / pairs as f64),
            Figure::plain(rate),
            Figure::plain(echo),
            Figure::plain(restarted),
        ])
    })
}
