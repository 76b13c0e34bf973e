//! Recovery of lost connections, and the cost of the client library.
//!
//! Unlike other scenarios, this one measures the client library, which implements recovery.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use exec_server_client::executor::{Executor, ExecutorConfig};
use exec_server_client::{
    ExecBackend as _, ExecProcess, ExecProcessEvent, ExecProcessEvents, ExecServerClient,
    ExecServerClientConnectOptions, LocalBackend, RemoteExecServerConnectArgs,
};
use exec_server_engine::request;
use exec_server_protocol::process::{Output, OutputParams, OutputStream, StartParams, WaitUntil};
use exec_server_protocol::{NotificationMethod as _, PathUri};
use exec_server_transport::keepalive::KeepaliveConfig;
use exec_server_transport::peer::Handler;
use exec_server_transport::{Link, LinkEvent, Peer};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};

use super::{Bench, RowSpec};
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::BenchServer;
use crate::stats::median;

/// Processes that are recovered together.
const PROCESSES: usize = 64;
/// Bytes of each event of the long stream.
const EVENT_BYTES: usize = 64;

pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let seconds = |name: String, limit| RowSpec {
        name,
        unit: Unit::Seconds,
        base: "",
        goals: vec![Goal::Value { limit, aim: limit }],
    };
    let against = |name: String, base, limit| RowSpec {
        name,
        unit: Unit::Seconds,
        base,
        goals: vec![Goal::Base { limit, aim: limit }],
    };
    let events = bench.pick(100_000, 20_000);
    let cuts = bench.pick(50, 15);
    let starts = bench.pick(400, 150);
    let lines = vec![
        seconds("cut to first byte p50".to_owned(), 0.060),
        seconds(format!("{PROCESSES} processes recovered"), 0.150),
        against(format!("{events} events, subscribed"), "direct", 1.2),
        against("local start, by the trait".to_owned(), "executor", 1.05),
    ];
    let prepare = |command: &_| {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()?;
        anyhow::Ok((BenchServer::start(command)?, runtime))
    };
    bench.alone(bench.pick(5, 3), lines, prepare, |(server, runtime)| {
        let cut = runtime.block_on(first_bytes(server.address, cuts))?;
        let together = runtime.block_on(many(server.address))?;
        let [direct, subscribed] = streams(runtime, events)?;
        let [executor, backend] = local_starts(starts)?;
        Ok(vec![
            Figure::plain(cut),
            Figure::plain(together),
            Figure::against(subscribed, direct),
            Figure::against(backend, executor),
        ])
    })
}

/// TCP forwarder that can cut its connections.
struct RecoveryForwarder {
    address: SocketAddr,
    cuts: watch::Sender<()>,
}

impl RecoveryForwarder {
    async fn start(server: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let cuts = watch::Sender::new(());
        let cut = cuts.clone();
        // Ends with the runtime.
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut cut = cut.subscribe();
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(server).await?;
                    client.set_nodelay(true)?;
                    server.set_nodelay(true)?;
                    tokio::select! {
                        carried = tokio::io::copy_bidirectional(&mut client, &mut server) => {
                            carried.map(|_| ())
                        }
                        _ = cut.changed() => Ok(()),
                    }
                });
            }
        });
        Ok(Self { address, cuts })
    }

    fn cut(&self) {
        self.cuts.send_replace(());
    }

    async fn client(&self) -> anyhow::Result<ExecServerClient> {
        let args = RemoteExecServerConnectArgs::new(format!("ws://{}", self.address), "bench");
        Ok(ExecServerClient::connect(args).await?)
    }
}

fn params(id: usize, argv: &[&str]) -> anyhow::Result<StartParams> {
    Ok(StartParams {
        process_id: format!("bench-{id}"),
        argv: argv.iter().map(|&arg| arg.to_owned()).collect(),
        cwd: PathUri::parse("file:///")?,
        pipe_stdin: true,
        ..StartParams::default()
    })
}

/// A process that echoes its input.
struct EchoProcess {
    process: Arc<dyn ExecProcess>,
    events: ExecProcessEvents,
}

impl EchoProcess {
    async fn start(client: &ExecServerClient, id: usize) -> anyhow::Result<Self> {
        let process = client.start(params(id, &["/bin/cat"])?).await?.process;
        let events = process.events()?;
        let mut echo = Self { process, events };
        echo.round_trip().await?;
        Ok(echo)
    }

    /// Sends a byte and waits for its echo.
    async fn round_trip(&mut self) -> anyhow::Result<()> {
        self.process.write(b"x".as_slice().into()).await?;
        match self.events.recv().await {
            Some(ExecProcessEvent::Output { chunk, .. }) if *chunk == *b"x" => Ok(()),
            other => bail!("{other:?} instead of an echo"),
        }
    }
}

/// Median seconds from a cut to the echo of a byte over the next connection.
async fn first_bytes(server: SocketAddr, count: usize) -> anyhow::Result<f64> {
    /// Longer than a connection must live to be considered stable.
    const STABLE_AFTER: Duration = Duration::from_millis(1100);
    let cutting = RecoveryForwarder::start(server).await?;
    let client = cutting.client().await?;
    let mut echo = EchoProcess::start(&client, 0).await?;
    let mut samples = Vec::with_capacity(count);
    for number in 0..count {
        if number % 7 == 6 {
            // After unstable connections the client waits longer before it reconnects.
            tokio::time::sleep(STABLE_AFTER).await;
        }
        let start = Instant::now();
        cutting.cut();
        echo.round_trip().await?;
        samples.push(start.elapsed().as_secs_f64());
    }
    client.end_session().await?;
    Ok(median(&samples))
}

/// Seconds from a cut until each of many processes has echoed over the next connection.
async fn many(server: SocketAddr) -> anyhow::Result<f64> {
    let cutting = RecoveryForwarder::start(server).await?;
    let client = cutting.client().await?;
    let mut echoes = Vec::with_capacity(PROCESSES);
    for id in 0..PROCESSES {
        echoes.push(EchoProcess::start(&client, id).await?);
    }
    let start = Instant::now();
    cutting.cut();
    let asking: Vec<_> = echoes
        .into_iter()
        .map(|mut echo| tokio::spawn(async move { echo.round_trip().await.map(|()| echo) }))
        .collect();
    let mut echoes = Vec::with_capacity(PROCESSES);
    for asked in asking {
        echoes.push(asked.await??);
    }
    let elapsed = start.elapsed().as_secs_f64();
    client.end_session().await?;
    Ok(elapsed)
}

/// The same notifications decoded and numbered only, and through a client to its subscriber.
fn streams(runtime: &Runtime, events: u64) -> anyhow::Result<[f64; 2]> {
    runtime.block_on(async {
        // In turns, so that neither has warmer caches.
        let mut seconds = [f64::MAX; 2];
        for _ in 0..3 {
            seconds[0] = seconds[0].min(direct(events).await?);
            seconds[1] = seconds[1].min(subscribed(events).await?);
        }
        Ok(seconds)
    })
}

/// Serves one process that writes `events` events.
async fn serve_events(mut link: Link, events: u64) -> anyhow::Result<()> {
    let send = async |link: &mut Link, message: Value| {
        let text = message.to_string();
        link.outgoing
            .push_message(text.len(), |out| out.extend_from_slice(text.as_bytes()));
        link.outgoing.flush().await
    };
    loop {
        let (id, method) = match link.incoming.recv().await? {
            Some(LinkEvent::Message(text)) => {
                let message: Value = serde_json::from_str(text)?;
                (message["id"].clone(), message["method"].clone())
            }
            _ => bail!("the client left"),
        };
        let info = json!({"shell": {"name": "sh", "path": "/bin/sh"}});
        let result = match method.as_str() {
            Some("initialize") => json!({"sessionId": "s", "environmentInfo": info}),
            Some("process/start") => json!({"processId": "p"}),
            _ => continue,
        };
        send(&mut link, json!({"id": id, "result": result})).await?;
        if method == "process/start" {
            break;
        }
    }
    let params = OutputParams {
        process_id: "p".to_owned(),
        seq: 0,
        stream: OutputStream::Stdout,
        chunk: vec![b'x'; EVENT_BYTES].into(),
    };
    let message = json!({"method": Output::NAME, "params": params}).to_string();
    let (before, after) = message
        .split_once("\"seq\":0")
        .context("the message has a number")?;
    for seq in 1..=events {
        // Returns after as little work as possible: only the reader's time is measured.
        link.outgoing.push_message(message.len() + 8, |out| {
            out.extend_from_slice(before.as_bytes());
            out.extend_from_slice(b"\"seq\":");
            out.extend_from_slice(seq.to_string().as_bytes());
            out.extend_from_slice(after.as_bytes());
        });
        if seq % 16 == 0 {
            link.outgoing.flush().await?;
        }
    }
    let closed = json!({"processId": "p", "seq": events + 1});
    send(
        &mut link,
        json!({"method": "process/closed", "params": closed}),
    )
    .await?;
    // Until the client disconnects.
    while let Ok(Some(_)) = link.incoming.recv().await {}
    Ok(())
}

/// Forwards notifications as they arrive.
struct NumberedNotifications(mpsc::Sender<OutputParams>);

impl Handler for NumberedNotifications {
    async fn notification(&mut self, method: &str, params: Option<&str>) -> Result<(), String> {
        if method == Output::NAME {
            let params = serde_json::from_str(params.unwrap_or("null"));
            let params = params.map_err(|error| error.to_string())?;
            self.0
                .send(params)
                .await
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

async fn direct(events: u64) -> anyhow::Result<f64> {
    use exec_server_protocol::process::Start;
    use exec_server_protocol::session::{Initialize, InitializeParams};
    let (here, there) = Link::pair();
    let server = tokio::spawn(serve_events(there, events));
    let (sender, mut numbers) = mpsc::channel(1024);
    let peer = Peer::new(
        here,
        KeepaliveConfig::default(),
        NumberedNotifications(sender),
    );
    peer.call::<Initialize>(&InitializeParams::default(), None)
        .await?;
    let start = Instant::now();
    peer.call::<Start>(&params(0, &["x"])?, None).await?;
    for expected in 1..=events {
        let output = numbers.recv().await.context("the stream ended")?;
        ensure!(output.seq == expected, "{} at {expected}", output.seq);
    }
    let elapsed = start.elapsed().as_secs_f64();
    server.abort();
    Ok(elapsed)
}

async fn subscribed(events: u64) -> anyhow::Result<f64> {
    let (here, there) = Link::pair();
    let server = tokio::spawn(serve_events(there, events));
    let options = ExecServerClientConnectOptions::new("bench");
    let client = ExecServerClient::from_link(here, options).await?;
    let start = Instant::now();
    let params = StartParams {
        process_id: "p".to_owned(),
        ..params(0, &["x"])?
    };
    let process = client.start(params).await?.process;
    let mut subscriber = process.events()?;
    for expected in 1..=events {
        match subscriber.recv().await {
            Some(ExecProcessEvent::Output { seq, .. }) if seq == expected => {}
            other => bail!("{other:?} at {expected}"),
        }
    }
    let elapsed = start.elapsed().as_secs_f64();
    server.abort();
    Ok(elapsed)
}

/// Median seconds of local starts: by the executor, and by the backend trait.
fn local_starts(count: usize) -> anyhow::Result<[f64; 2]> {
    // One thread: with several, chance decides on which one a task wakes up.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let executor = Executor::new(ExecutorConfig::default())?;
        let backend = LocalBackend::new(executor.clone());
        let mut samples = [Vec::with_capacity(count), Vec::with_capacity(count)];
        for number in 0..2 * count {
            let params = params(number, &["/bin/true"])?;
            // Each kind comes first equally often, because the previous start leaves work behind.
            let kind = [0, 1, 1, 0][number % 4];
            let mut taken = params.clone();
            let start = Instant::now();
            if kind == 0 {
                let spec = request::spec(&mut taken, &executor.config().environment)?;
                let process = executor.start(spec).await?;
                samples[kind].push(start.elapsed().as_secs_f64());
                process.wait_for(|log| log.close().map(|_| ())).await;
            } else {
                let started = backend.start(params).await?;
                samples[kind].push(start.elapsed().as_secs_f64());
                started.process.wait(WaitUntil::Closed, None).await?;
            }
        }
        Ok(samples.map(|samples| median(&samples)))
    })
}
