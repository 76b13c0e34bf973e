//! Cost of operating a server: tokens, TLS, many connections, metrics, the audit log.
//!
//! These features are not part of the compatible wire, so only the server under test is measured,
//! compared with itself without the feature.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use tempfile::TempDir;

use super::echo::TerminalClient;
use super::spawn::wait_closed;
use super::stream::rate;
use super::{Bench, RowSpec, size};
use crate::client::{BenchClient, ChildStdio};
use crate::floor::{self, TRUE};
use crate::pattern::BytePattern;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::{BenchServer, CommandLine};
use crate::stats::{median, percentile};

/// Any text of a token's usual length.
const TOKEN: &str = "a-token-that-is-as-long-as-a-usual-one-00000";

/// A row with an absolute limit.
fn line(name: String, unit: Unit, limit: f64) -> RowSpec {
    RowSpec {
        name,
        unit,
        base: "",
        goals: vec![Goal::Value { limit, aim: limit }],
    }
}

/// A row that is compared with the same server without the feature.
fn against(name: String, unit: Unit, base: &'static str, limit: f64) -> RowSpec {
    RowSpec {
        name,
        unit,
        base,
        goals: vec![Goal::Base { limit, aim: limit }],
    }
}

fn write(directory: &TempDir, name: &str, text: &str) -> anyhow::Result<String> {
    let path = directory.path().join(name);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path.display().to_string())
}

/// Starts a server that requires [`TOKEN`], with the files it needs.
fn start_with_token(
    command: &CommandLine,
    options: &[&str],
) -> anyhow::Result<(BenchServer, TempDir)> {
    let directory = tempfile::tempdir()?;
    let file = write(&directory, "token", TOKEN)?;
    let auth = ["--ws-auth", "capability-token", "--ws-token-file", &file];
    let server = BenchServer::start_with(command, &[&auth, options].concat())?;
    Ok((server, directory))
}

/// Connection, upgrade and `initialize` with a token, minus the same without.
pub(super) fn tokens(bench: &Bench) -> Vec<ReportRow> {
    struct TokensSetup {
        open: BenchServer,
        token: (BenchServer, TempDir),
        signed: (BenchServer, TempDir),
        jwt: String,
    }
    let count = 40;
    let added = |name: &str| line(format!("handshake, added by a {name}"), Unit::Seconds, 1e-4);
    let prepare = |command: &CommandLine| {
        let directory = tempfile::tempdir()?;
        let secret = write(&directory, "secret", TOKEN)?;
        let jwt = command.output(&[
            "token",
            "sign",
            "--secret-file",
            &secret,
            "--subject",
            "bench",
            "--scope",
            "exec",
        ])?;
        let options = [
            "--ws-auth",
            "signed-bearer-token",
            "--ws-shared-secret-file",
            &secret,
        ];
        Ok(TokensSetup {
            open: BenchServer::start(command)?,
            token: start_with_token(command, &[])?,
            signed: (BenchServer::start_with(command, &options)?, directory),
            jwt: jwt.trim().to_owned(),
        })
    };
    let lines = vec![added("token"), added("signed token")];
    bench.alone(bench.pick(13, 5), lines, prepare, |prepared| {
        let kinds = [
            // The header is sent in both cases, so that only the check makes the difference.
            (prepared.open.address, TOKEN),
            (prepared.token.0.address, TOKEN),
            (prepared.signed.0.address, &prepared.jwt),
        ];
        let mut samples = kinds.map(|_| Vec::with_capacity(count));
        for _ in 0..count {
            for (samples, (address, token)) in samples.iter_mut().zip(kinds) {
                let start = Instant::now();
                BenchClient::connect_as(address, token)?.initialize()?;
                samples.push(start.elapsed().as_secs_f64());
                floor::pause();
            }
        }
        let [open, token, signed] = samples.map(|samples| median(&samples));
        Ok(vec![
            Figure::plain((token - open).max(0.0)),
            Figure::plain((signed - open).max(0.0)),
        ])
    })
}

/// A TLS handshake with a new key exchange, and output over TLS compared with plain output.
pub(super) fn tls(bench: &Bench) -> Vec<ReportRow> {
    struct TlsSetup {
        server: BenchServer,
        address: SocketAddr,
        config: Arc<ClientConfig>,
        _files: TempDir,
    }
    let count = 40;
    let pattern = BytePattern::new();
    let total: u64 = bench.pick(256 << 20, 64 << 20);
    let lines = vec![
        line("TLS handshake p50".to_owned(), Unit::Seconds, 4e-3),
        against(
            format!("TLS stream {} from one", size(total)),
            Unit::BytesPerSecond,
            "plain",
            0.5,
        ),
    ];
    let prepare = |command: &CommandLine| {
        let files = tempfile::tempdir()?;
        let path = |name: &str| files.path().join(name).display().to_string();
        let (cert, key) = (path("cert.pem"), path("key.pem"));
        let options = [
            "--listen",
            "wss://127.0.0.1:0",
            "--tls-self-signed",
            "--tls-cert",
            &cert,
            "--tls-key",
            &key,
        ];
        let mut server = BenchServer::start_with(command, &options)?;
        let address = server.next_address("wss://")?;
        let config = trust_only(Path::new(&cert))?;
        Ok(TlsSetup {
            server,
            address,
            config,
            _files: files,
        })
    };
    bench.alone(bench.pick(7, 3), lines, prepare, |prepared| {
        let mut samples = Vec::with_capacity(count);
        for _ in 0..count {
            let start = Instant::now();
            BenchClient::connect_tls(prepared.address, &prepared.config)?.initialize()?;
            samples.push(start.elapsed().as_secs_f64());
            floor::pause();
        }
        let client = BenchClient::connect_tls(prepared.address, &prepared.config)?.ready()?;
        let plain = rate(bench, prepared.server.client()?, &pattern, (1, total), None)?;
        let tls = rate(bench, client, &pattern, (1, total), None)?;
        Ok(vec![
            Figure::plain(median(&samples)),
            Figure::against(tls, plain),
        ])
    })
}

/// Trusts one certificate and stores no sessions, so that each handshake is a full one.
fn trust_only(cert: &Path) -> anyhow::Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(cert)? {
        roots.add(certificate?)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// Authenticated connections with a session that are idle.
pub(super) fn idle_connections(bench: &Bench) -> Vec<ReportRow> {
    const MIB: f64 = 1024.0 * 1024.0;
    let count = bench.pick(5000, 1000);
    let keys = bench.pick(500, 300);
    let lines = vec![
        line(
            format!("{count} idle connections: growth"),
            Unit::Bytes,
            250.0 * MIB * count as f64 / 5000.0,
        ),
        line(
            format!("{count} idle connections: accepted"),
            Unit::PerSecond,
            2000.0,
        ),
        against(
            format!("{count} idle connections: echo p50"),
            Unit::Seconds,
            "without",
            1.5,
        ),
    ];
    let prepare = |command: &CommandLine| {
        let options = [
            "--set",
            "limits.sessions=16384",
            // Each round begins with an empty server.
            "--set",
            "times.detach_grace=0s",
        ];
        let (server, directory) = start_with_token(command, &options)?;
        let server = server.observed()?;
        drop(BenchClient::connect_as(server.address, TOKEN)?.ready()?);
        // Measured once for all rounds, so that memory that a round leaves behind is included in
        // the next.
        let before = server.resident_at_rest()?;
        Ok((server, directory, before))
    };
    bench.alone(bench.pick(5, 3), lines, prepare, |(server, _, before)| {
        let enter = |address| BenchClient::connect_as(address, TOKEN)?.ready();
        let mut terminal = TerminalClient::start(enter(server.address)?)?;
        // Warms up, so that later echoes run under equal conditions.
        terminal.type_keys(keys, Duration::ZERO)?;
        let calm = percentile(&terminal.type_keys(keys, Duration::ZERO)?, 50.0);
        let start = Instant::now();
        let clients: Vec<BenchClient> = (0..count)
            .map(|_| enter(server.address))
            .collect::<anyhow::Result<_>>()?;
        let rate = count as f64 / start.elapsed().as_secs_f64();
        let after = server.resident_at_rest()?;
        let busy = percentile(&terminal.type_keys(keys, Duration::ZERO)?, 50.0);
        drop(clients);
        Ok(vec![
            Figure::plain(after as f64 - *before as f64),
            Figure::plain(rate),
            Figure::against(busy, calm),
        ])
    })
}

/// Scrapes of a server with many running processes, and echoes of a terminal meanwhile.
pub(super) fn metrics(bench: &Bench) -> Vec<ReportRow> {
    /// More frequent than any scraper.
    const PERIOD: Duration = Duration::from_millis(50);
    struct MetricsSetup {
        address: SocketAddr,
        terminal: TerminalClient,
        /// Owner of the session of the processes.
        _owner: BenchClient,
        _server: BenchServer,
    }
    let processes = bench.pick(500, 200);
    let keys = bench.pick(500, 300);
    let lines = vec![
        line(
            format!("scrape p50, {processes} processes"),
            Unit::Seconds,
            5e-3,
        ),
        against(
            "echo p50, scraped 20 times a second".to_owned(),
            Unit::Seconds,
            "unscraped",
            1.1,
        ),
    ];
    let prepare = |command: &CommandLine| {
        let options = ["--metrics-listen", "127.0.0.1:0"];
        let server = BenchServer::start_with(command, &options)?;
        let address = server.logged_address("metrics: http://", "/metrics")?;
        let mut owner = server.client()?;
        for _ in 0..processes {
            let (request, _) = owner.start(&["sleep", "1000"], ChildStdio::Pipe)?;
            owner.answer(request)?;
        }
        let page = scrape(address)?;
        let expected = format!("exec_server_processes {processes}\n");
        ensure!(page.contains(&expected), "no `{expected}` in\n{page}");
        Ok(MetricsSetup {
            address,
            terminal: TerminalClient::start(server.client()?)?,
            _owner: owner,
            _server: server,
        })
    };
    bench.alone(bench.pick(9, 3), lines, prepare, |prepared| {
        let mut samples = Vec::new();
        for _ in 0..20 {
            let start = Instant::now();
            scrape(prepared.address)?;
            samples.push(start.elapsed().as_secs_f64());
        }
        let terminal = &mut prepared.terminal;
        let calm = percentile(&terminal.type_keys(keys, Duration::ZERO)?, 50.0);
        let done = AtomicBool::new(false);
        let address = prepared.address;
        let (busy, scraped) = std::thread::scope(|scope| {
            let scraper = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    scrape(address)?;
                    std::thread::sleep(PERIOD);
                }
                anyhow::Ok(())
            });
            let busy = terminal.type_keys(keys, Duration::ZERO);
            done.store(true, Ordering::Relaxed);
            (busy, scraper.join())
        });
        scraped.map_err(|_| anyhow::anyhow!("the scraper panicked"))??;
        Ok(vec![
            Figure::plain(median(&samples)),
            Figure::against(percentile(&busy?, 50.0), calm),
        ])
    })
}

/// Returns the whole page.
pub(crate) fn scrape(address: SocketAddr) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    ensure!(page.starts_with("HTTP/1.1 200"), "no metrics: {page}");
    Ok(page)
}

/// Start to closed, sequentially, with and without an audit log.
pub(super) fn audit(bench: &Bench) -> Vec<ReportRow> {
    let count = bench.pick(60, 30);
    let lines = vec![against(
        "spawn p50, audit log on".to_owned(),
        Unit::Seconds,
        "off",
        1.05,
    )];
    let prepare = |command: &CommandLine| {
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("audit.jsonl").display().to_string();
        let with = BenchServer::start_with(command, &["--audit-file", &file])?;
        let without = BenchServer::start(command)?;
        Ok((with, without, file, directory))
    };
    let rounds = bench.pick(15, 5);
    bench.alone(rounds, lines, prepare, |(with, without, file, _)| {
        let mut clients = [with.client()?, without.client()?];
        let mut samples = [Vec::new(), Vec::new()];
        // In turns, so that a slow moment of the machine affects both.
        for _ in 0..count {
            for (client, samples) in clients.iter_mut().zip(&mut samples) {
                let start = Instant::now();
                client.start(&[TRUE], ChildStdio::Pipe)?;
                wait_closed(client, 1)?;
                samples.push(start.elapsed().as_secs_f64());
            }
        }
        let written = fs::read_to_string(file.as_str())?;
        ensure!(written.contains("\"started\""), "the audit log is empty");
        let [on, off] = samples.map(|samples| median(&samples));
        Ok(vec![Figure::against(on, off)])
    })
}
