//! Scenarios, and the rounds in which floor, server and peer are measured in turns.
//!
//! A scenario starts new servers and then measures floor, server and peer several times in turns,
//! so that a slow moment of the machine affects all of them; each figure is the median over the
//! rounds. Many short rounds vary less than few long ones.
//!
//! Scenarios whose cost is mostly wake-ups run in two placements: chosen by the scheduler, and
//! everything on one core. Whether two processes share a core changes such figures by a factor of
//! three in a small virtual machine, and chance decides it. Figures are compared only with figures
//! of the same placement, and a row has the better placement of each side.

mod agents;
mod echo;
mod endurance;
mod files;
mod fleet;
mod handshake;
mod hosted;
mod http;
mod memory;
pub(crate) mod network;
mod recovery;
pub(crate) mod relay;
mod rendezvous;
pub(crate) mod sandbox;
mod scale;
pub(crate) mod server_options;
mod snapshot;
mod spawn;
mod ssh;
mod stdin;
mod stream;
mod trees;

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::Instant;

use clap::ValueEnum;

use crate::placement::Placement;
use crate::report::{Figure, FigureOutcome, Goal, ReportRow, Unit};
use crate::server::{BenchServer, CommandLine};
use crate::stats::median;

/// Scenario, as named on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ScenarioName {
    /// From the start of the command to the first response
    Startup,
    /// Connection and `initialize`
    Handshake,
    /// Start to closed, sequentially and sixteen at a time
    Spawn,
    /// Start to closed under a policy, sequentially
    Sandbox,
    /// Keystrokes through a terminal, alone and during a flood of output
    Echo,
    /// Output of one process and of eight
    Stream,
    /// A reader that sleeps while a child writes
    #[value(name = "sleeper")]
    SleepingReader,
    /// Input of one process
    Stdin,
    /// Metadata, reads, writes, directories and trees
    Files,
    /// Search of a tree
    Search,
    /// Changes of a tree: delay of the notification, and memory of a watch
    Watch,
    /// Many small files to the server
    Upload,
    /// Copy of an unchanged tree with `-a`, compared with rsync.
    Unchanged,
    /// Requests that a server makes: small ones, and a streamed body
    Http,
    /// Through the proxy of a managed network instead of directly, and starts with one
    Network,
    /// Commands of a login shell whose start-up files are slow
    Snapshot,
    /// Memory of an idle server
    Idle,
    /// Memory of live processes
    Processes,
    /// Memory of idle connections
    Connections,
    /// Spawns of a server with much resident memory
    Large,
    /// Cost of tokens in a handshake
    Tokens,
    /// Handshakes and output over TLS
    Tls,
    /// Thousands of idle connections with a token
    #[value(name = "crowd")]
    IdleConnections,
    /// Scrapes of `/metrics`
    Metrics,
    /// Spawns with an audit log
    Audit,
    /// Commands for models, directly and over MCP
    Agents,
    /// Commands on a machine behind ssh
    Ssh,
    /// Lost connections, and the cost of the client library
    Recovery,
    /// Through a rendezvous server instead of directly
    Relay,
    /// An executor at the registry of a service: start, and memory with a stream
    Hosted,
    /// A rendezvous server with thousands of connections, and its restart
    #[value(name = "rendezvous-crowd")]
    RendezvousLoad,
    /// Three clustered rendezvous nodes, between two of them and on one
    Fleet,
    /// Growth of time, CPU and memory with up to 10,000 of each kind of object
    Scale,
    /// Memory after bursts, and the cost of output in single bytes
    Endurance,
}

/// One of the servers that are compared.
#[derive(Debug, Clone)]
pub(crate) struct BenchSide {
    /// ScenarioName in the progress output.
    pub(crate) name: &'static str,
    /// Command that starts it.
    pub(crate) command: CommandLine,
}

/// Settings that all scenarios share.
#[derive(Debug)]
pub(crate) struct Bench {
    /// This program, which is also the child of some scenarios.
    pub(crate) own: PathBuf,
    /// The server under test, then the peer if there is one.
    pub(crate) sides: Vec<BenchSide>,
    /// Fewer rounds and smaller sizes.
    pub(crate) quick: bool,
    /// Part of the names of the rows to measure.
    pub(crate) rows: Option<String>,
}

/// Description of a row without figures.
struct RowSpec {
    name: String,
    unit: Unit,
    base: &'static str,
    goals: Vec<Goal>,
}

/// Figures of one side in one round, one for each row of the scenario.
type Figures = Vec<Figure>;

impl Bench {
    /// Runs the named scenarios, or all of them.
    pub(crate) fn run(&self, only: &[ScenarioName]) -> Vec<ReportRow> {
        let mut rows = Vec::new();
        for &name in ScenarioName::value_variants() {
            if !only.is_empty() && !only.contains(&name) {
                continue;
            }
            let start = Instant::now();
            rows.extend(match name {
                ScenarioName::Startup => handshake::startup(self),
                ScenarioName::Handshake => handshake::run(self),
                ScenarioName::Spawn => spawn::run(self),
                ScenarioName::Sandbox => sandbox::run(self),
                ScenarioName::Echo => echo::run(self),
                ScenarioName::Stream => stream::run(self),
                ScenarioName::SleepingReader => stream::sleeping_reader(self),
                ScenarioName::Stdin => stdin::run(self),
                ScenarioName::Files => files::run(self),
                ScenarioName::Search => trees::search(self),
                ScenarioName::Watch => trees::watch(self),
                ScenarioName::Upload => trees::upload(self),
                ScenarioName::Unchanged => trees::unchanged(self),
                ScenarioName::Http => http::run(self),
                ScenarioName::Network => network::run(self),
                ScenarioName::Snapshot => snapshot::run(self),
                ScenarioName::Idle => memory::idle(self),
                ScenarioName::Processes => memory::processes(self),
                ScenarioName::Connections => memory::connections(self),
                ScenarioName::Large => spawn::large(self),
                ScenarioName::Tokens => server_options::tokens(self),
                ScenarioName::Tls => server_options::tls(self),
                ScenarioName::IdleConnections => server_options::idle_connections(self),
                ScenarioName::Metrics => server_options::metrics(self),
                ScenarioName::Audit => server_options::audit(self),
                ScenarioName::Agents => agents::run(self),
                ScenarioName::Ssh => ssh::run(self),
                ScenarioName::Recovery => recovery::run(self),
                ScenarioName::Relay => relay::run(self),
                ScenarioName::Hosted => hosted::run(self),
                ScenarioName::RendezvousLoad => rendezvous::run(self),
                ScenarioName::Fleet => fleet::run(self),
                ScenarioName::Scale => scale::run(self),
                ScenarioName::Endurance => endurance::run(self),
            });
            transient("");
            eprintln!("{name:?}: {:.1} s", start.elapsed().as_secs_f64());
        }
        rows
    }

    /// Returns the same settings without the peer, for features that no peer has.
    fn without_peer(&self) -> Self {
        Self {
            own: self.own.clone(),
            sides: self.sides.iter().take(1).cloned().collect(),
            quick: self.quick,
            rows: self.rows.clone(),
        }
    }

    /// Whether any of these rows is selected; rows that are measured together are selected
    /// together.
    fn wants(&self, lines: &[RowSpec]) -> bool {
        let Some(part) = &self.rows else { return true };
        lines.iter().any(|line| line.name.contains(part))
    }

    /// Chooses a number for a full or a quick run.
    fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Runs rounds of `floor` and then `measure` with a server of each side.
    ///
    /// `measure` gets a server that runs for the whole scenario, and the result of `floor`.
    fn rounds<F>(
        &self,
        count: usize,
        lines: Vec<RowSpec>,
        mut floor: impl FnMut() -> anyhow::Result<F>,
        mut measure: impl FnMut(&BenchServer, &F) -> anyhow::Result<Figures>,
    ) -> Vec<ReportRow> {
        if !self.wants(&lines) {
            return Vec::new();
        }
        let outcomes = self.run_rounds(count, &lines, &mut floor, &mut measure);
        rows(lines, outcomes)
    }

    /// Runs [`Bench::rounds`] once on one core and once on all cores.
    fn placed_rounds<F>(
        &self,
        count: usize,
        lines: Vec<RowSpec>,
        mut floor: impl FnMut() -> anyhow::Result<F>,
        mut measure: impl FnMut(&BenchServer, &F) -> anyhow::Result<Figures>,
    ) -> Vec<ReportRow> {
        if !self.wants(&lines) {
            return Vec::new();
        }
        let free = self.run_rounds(count, &lines, &mut floor, &mut measure);
        let pinned = match Placement::one_core() {
            Ok(_placement) => self.run_rounds(count, &lines, &mut floor, &mut measure),
            // A host without CPU affinity has only one placement.
            Err(_) => free.clone(),
        };
        let outcomes = free.into_iter().zip(pinned).map(|(free, pinned)| {
            let (free, pinned) = (free?, pinned?);
            let figures = free.into_iter().zip(pinned).zip(&lines);
            Ok(figures
                .map(|((free, pinned), line)| free.better(pinned, line.unit))
                .collect())
        });
        let outcomes = outcomes.collect();
        rows(lines, outcomes)
    }

    /// Returns the medians of each side, one figure for each row.
    fn run_rounds<F>(
        &self,
        count: usize,
        lines: &[RowSpec],
        mut floor: impl FnMut() -> anyhow::Result<F>,
        mut measure: impl FnMut(&BenchServer, &F) -> anyhow::Result<Figures>,
    ) -> Vec<Result<Figures, String>> {
        let mut servers: Vec<Result<BenchServer, String>> = self
            .sides
            .iter()
            .map(|side| BenchServer::start(&side.command).map_err(|error| format!("{error:#}")))
            .collect();
        let mut seen: Vec<Vec<Figures>> = self.sides.iter().map(|_| Vec::new()).collect();
        for round in 1..=count {
            let found = match floor() {
                Ok(found) => found,
                Err(error) => {
                    return vec![Err(format!("no floor: {error:#}")); self.sides.len()];
                }
            };
            for ((side, server), seen) in self.sides.iter().zip(&mut servers).zip(&mut seen) {
                let Ok(running) = server else { continue };
                progress(&lines[0].name, round, count, side);
                match measure(running, &found) {
                    Ok(figures) => seen.push(figures),
                    Err(error) => *server = Err(format!("{error:#}")),
                }
            }
        }
        let outcomes = servers
            .into_iter()
            .zip(seen)
            .map(|(server, seen)| server.map(|_| by_line(&seen, lines.len())));
        outcomes.collect()
    }

    /// Runs rounds of `measure` with what `prepare` creates for the server under test.
    ///
    /// For features outside the compatible wire, which the peer does not have.
    fn alone<S>(
        &self,
        count: usize,
        lines: Vec<RowSpec>,
        prepare: impl FnOnce(&CommandLine) -> anyhow::Result<S>,
        mut measure: impl FnMut(&mut S) -> anyhow::Result<Figures>,
    ) -> Vec<ReportRow> {
        let Some(side) = self.sides.first().filter(|_| self.wants(&lines)) else {
            return Vec::new();
        };
        let go = || -> anyhow::Result<Figures> {
            let mut prepared = prepare(&side.command)?;
            let mut seen = Vec::with_capacity(count);
            for round in 1..=count {
                progress(&lines[0].name, round, count, side);
                seen.push(measure(&mut prepared)?);
            }
            Ok(by_line(&seen, lines.len()))
        };
        let outcome = go().map_err(|error| format!("{error:#}"));
        rows(lines, vec![outcome])
    }

    /// Runs `measure` with each side once or several times; it starts the servers itself.
    fn measure_each(
        &self,
        count: usize,
        line: RowSpec,
        mut measure: impl FnMut(&CommandLine) -> anyhow::Result<Figure>,
    ) -> Vec<ReportRow> {
        if !self.wants(std::slice::from_ref(&line)) {
            return Vec::new();
        }
        let mut seen: Vec<Result<Figures, String>> =
            self.sides.iter().map(|_| Ok(Vec::new())).collect();
        for round in 1..=count {
            for (side, seen) in self.sides.iter().zip(&mut seen) {
                let Ok(figures) = seen else { continue };
                progress(&line.name, round, count, side);
                match measure(&side.command) {
                    Ok(figure) => figures.push(figure),
                    Err(error) => *seen = Err(format!("{error:#}")),
                }
            }
        }
        let outcomes = seen
            .into_iter()
            .map(|seen| seen.map(|figures| vec![median_figure(&figures)]))
            .collect();
        rows(vec![line], outcomes)
    }
}

fn progress(name: &str, round: usize, count: usize, side: &BenchSide) {
    transient(&format!("{name}: round {round} of {count}, {}", side.name));
}

/// Replaces the current line of a terminal; writes nothing to other outputs.
fn transient(text: &str) {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        // The progress line may be lost.
        let _ = write!(stderr, "\r\x1b[K{text}\r");
    }
}

/// Returns the medians over all rounds, for each of `lines` rows.
fn by_line(seen: &[Figures], lines: usize) -> Figures {
    let of =
        |line: usize| median_figure(&seen.iter().map(|figures| figures[line]).collect::<Vec<_>>());
    (0..lines).map(of).collect()
}

/// Returns the medians of values and bases.
fn median_figure(figures: &[Figure]) -> Figure {
    let values: Vec<f64> = figures.iter().map(|figure| figure.value).collect();
    let bases: Vec<f64> = figures.iter().filter_map(|figure| figure.base).collect();
    Figure {
        value: median(&values),
        base: (!bases.is_empty()).then(|| median(&bases)),
    }
}

fn rows(lines: Vec<RowSpec>, outcomes: Vec<Result<Figures, String>>) -> Vec<ReportRow> {
    let of = |side: usize, line: usize| -> Option<FigureOutcome> {
        let outcome = outcomes.get(side)?;
        Some(
            outcome
                .as_ref()
                .map(|figures| figures[line])
                .map_err(Clone::clone),
        )
    };
    lines
        .into_iter()
        .enumerate()
        .map(
            |(
                index,
                RowSpec {
                    name,
                    unit,
                    base,
                    goals,
                },
            )| ReportRow {
                name,
                unit,
                base,
                goals,
                server: of(0, index).unwrap_or_else(|| Err("not measured".to_owned())),
                peer: of(1, index),
            },
        )
        .collect()
}

/// Formats a size in binary units.
fn size(bytes: u64) -> String {
    if bytes >= 1 << 30 {
        format!("{} GiB", bytes >> 30)
    } else {
        format!("{} MiB", bytes >> 20)
    }
}
