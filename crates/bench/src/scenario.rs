//! The scenarios, and the order in which floor, server and peer take turns in them.
//!
//! A scenario starts fresh servers, then goes round floor, server, peer several times, so that a
//! slow moment of the machine hits all of them alike; each figure is the median over the rounds.
//! Many short rounds are steadier than few long ones.
//!
//! Scenarios that are all about waking somebody up go round twice: placed by the scheduler, and with
//! everything on one core. Whether two processes share a core changes such figures by a factor of
//! three in a small virtual machine, and chance decides it; so a figure is only ever compared with
//! one of the same placement, and a row shows each side in the placement that suits it better.

mod agents;
mod echo;
mod files;
mod fleet;
mod handshake;
mod http;
mod meeting;
mod memory;
pub(crate) mod network;
pub(crate) mod operate;
mod recovery;
pub(crate) mod relay;
pub(crate) mod sandbox;
mod scale;
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
use crate::report::{Figure, Goal, Outcome, Row, Unit};
use crate::server::{CommandLine, Server};
use crate::stats::median;

/// What can be asked for by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Name {
    /// From the command to the first answer
    Startup,
    /// Connection and `initialize`
    Handshake,
    /// Start to closed, one by one and sixteen at a time
    Spawn,
    /// Start to closed under a policy, one by one
    Sandbox,
    /// Keystrokes through a terminal, calm and beside a flood
    Echo,
    /// Output of one process and of eight
    Stream,
    /// A reader that sleeps while a child writes
    Sleeper,
    /// Input of one process
    Stdin,
    /// Metadata, reads, writes, directories and trees
    Files,
    /// Matching lines of a tree
    Search,
    /// Changes of a tree: how soon they are told, and what waiting for them takes
    Watch,
    /// Many small files to the server
    Upload,
    /// Requests that a server makes: small ones, and a body that is streamed
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
    /// Spawns of a server with much memory
    Large,
    /// What tokens add to a handshake
    Tokens,
    /// Handshakes and output over TLS
    Tls,
    /// Thousands of idle connections with a token
    Crowd,
    /// Scrapes of `/metrics`
    Metrics,
    /// Spawns that are written down
    Audit,
    /// Commands for models, directly and by MCP
    Agents,
    /// Commands on a machine behind ssh
    Ssh,
    /// Lost connections, and what the client library costs
    Recovery,
    /// Through a meeting point instead of directly
    Relay,
    /// A meeting point with thousands at it, and its death
    RendezvousCrowd,
    /// Three meeting points that are one, between two of them and on one
    Fleet,
    /// How time, CPU and memory grow with up to 10,000 of each kind of object
    Scale,
}

/// One of the servers that are compared.
#[derive(Debug, Clone)]
pub(crate) struct Side {
    /// What it is called in the progress.
    pub(crate) name: &'static str,
    /// How it is started.
    pub(crate) command: CommandLine,
}

/// What all scenarios share.
#[derive(Debug)]
pub(crate) struct Bench {
    /// This program, which is also the child of some scenarios.
    pub(crate) own: PathBuf,
    /// The server under test, then the peer if there is one.
    pub(crate) sides: Vec<Side>,
    /// Fewer rounds and smaller sizes.
    pub(crate) quick: bool,
    /// Part of the names of the rows that are wanted.
    pub(crate) rows: Option<String>,
}

/// What a row is about, before there are figures.
struct Line {
    name: String,
    unit: Unit,
    base: &'static str,
    goals: Vec<Goal>,
}

/// What one side showed in one round, a figure for each row of the scenario.
type Figures = Vec<Figure>;

impl Bench {
    /// Runs the named scenarios, or all of them.
    pub(crate) fn run(&self, only: &[Name]) -> Vec<Row> {
        let mut rows = Vec::new();
        for &name in Name::value_variants() {
            if !only.is_empty() && !only.contains(&name) {
                continue;
            }
            let start = Instant::now();
            rows.extend(match name {
                Name::Startup => handshake::startup(self),
                Name::Handshake => handshake::run(self),
                Name::Spawn => spawn::run(self),
                Name::Sandbox => sandbox::run(self),
                Name::Echo => echo::run(self),
                Name::Stream => stream::run(self),
                Name::Sleeper => stream::sleeper(self),
                Name::Stdin => stdin::run(self),
                Name::Files => files::run(self),
                Name::Search => trees::search(self),
                Name::Watch => trees::watch(self),
                Name::Upload => trees::upload(self),
                Name::Http => http::run(self),
                Name::Network => network::run(self),
                Name::Snapshot => snapshot::run(self),
                Name::Idle => memory::idle(self),
                Name::Processes => memory::processes(self),
                Name::Connections => memory::connections(self),
                Name::Large => spawn::large(self),
                Name::Tokens => operate::tokens(self),
                Name::Tls => operate::tls(self),
                Name::Crowd => operate::crowd(self),
                Name::Metrics => operate::metrics(self),
                Name::Audit => operate::audit(self),
                Name::Agents => agents::run(self),
                Name::Ssh => ssh::run(self),
                Name::Recovery => recovery::run(self),
                Name::Relay => relay::run(self),
                Name::RendezvousCrowd => meeting::run(self),
                Name::Fleet => fleet::run(self),
                Name::Scale => scale::run(self),
            });
            transient("");
            eprintln!("{name:?}: {:.1} s", start.elapsed().as_secs_f64());
        }
        rows
    }

    /// The same with the server under test alone, for what no peer can do.
    fn without_peer(&self) -> Self {
        Self {
            own: self.own.clone(),
            sides: self.sides.iter().take(1).cloned().collect(),
            quick: self.quick,
            rows: self.rows.clone(),
        }
    }

    /// Whether any of these rows is wanted; those that are measured together come together.
    fn wants(&self, lines: &[Line]) -> bool {
        let Some(part) = &self.rows else { return true };
        lines.iter().any(|line| line.name.contains(part))
    }

    /// One number for a full run and one for a quick one.
    fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Goes round `floor` and then `measure` with a server of each side.
    ///
    /// `measure` gets a server that lives for the whole scenario and what `floor` found.
    fn rounds<F>(
        &self,
        count: usize,
        lines: Vec<Line>,
        mut floor: impl FnMut() -> anyhow::Result<F>,
        mut measure: impl FnMut(&Server, &F) -> anyhow::Result<Figures>,
    ) -> Vec<Row> {
        if !self.wants(&lines) {
            return Vec::new();
        }
        let outcomes = self.go_round(count, &lines, &mut floor, &mut measure);
        rows(lines, outcomes)
    }

    /// As [`Bench::rounds`], in both placements.
    fn placed_rounds<F>(
        &self,
        count: usize,
        lines: Vec<Line>,
        mut floor: impl FnMut() -> anyhow::Result<F>,
        mut measure: impl FnMut(&Server, &F) -> anyhow::Result<Figures>,
    ) -> Vec<Row> {
        if !self.wants(&lines) {
            return Vec::new();
        }
        let free = self.go_round(count, &lines, &mut floor, &mut measure);
        let pinned = match Placement::one_core() {
            Ok(_placement) => self.go_round(count, &lines, &mut floor, &mut measure),
            // A host that does not let its programs choose a core has one placement only.
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

    /// The medians of each side, a figure for each line.
    fn go_round<F>(
        &self,
        count: usize,
        lines: &[Line],
        mut floor: impl FnMut() -> anyhow::Result<F>,
        mut measure: impl FnMut(&Server, &F) -> anyhow::Result<Figures>,
    ) -> Vec<Result<Figures, String>> {
        let mut servers: Vec<Result<Server, String>> = self
            .sides
            .iter()
            .map(|side| Server::start(&side.command).map_err(|error| format!("{error:#}")))
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

    /// Goes round `measure` with what `prepare` makes of the server under test.
    ///
    /// For what is not on the compatible wire: the peer has no such thing and is left out.
    fn alone<S>(
        &self,
        count: usize,
        lines: Vec<Line>,
        prepare: impl FnOnce(&CommandLine) -> anyhow::Result<S>,
        mut measure: impl FnMut(&mut S) -> anyhow::Result<Figures>,
    ) -> Vec<Row> {
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
    fn each(
        &self,
        count: usize,
        line: Line,
        mut measure: impl FnMut(&CommandLine) -> anyhow::Result<Figure>,
    ) -> Vec<Row> {
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
            .map(|seen| seen.map(|figures| vec![middle(&figures)]))
            .collect();
        rows(vec![line], outcomes)
    }
}

fn progress(name: &str, round: usize, count: usize, side: &Side) {
    transient(&format!("{name}: round {round} of {count}, {}", side.name));
}

/// Replaces the line of a terminal; other outputs are spared what is gone in a moment.
fn transient(text: &str) {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        // Nobody misses a line that cannot be written.
        let _ = write!(stderr, "\r\x1b[K{text}\r");
    }
}

/// The medians over all rounds, for each of `lines` lines.
fn by_line(seen: &[Figures], lines: usize) -> Figures {
    let of = |line: usize| middle(&seen.iter().map(|figures| figures[line]).collect::<Vec<_>>());
    (0..lines).map(of).collect()
}

/// The medians of values and bases.
fn middle(figures: &[Figure]) -> Figure {
    let values: Vec<f64> = figures.iter().map(|figure| figure.value).collect();
    let bases: Vec<f64> = figures.iter().filter_map(|figure| figure.base).collect();
    Figure {
        value: median(&values),
        base: (!bases.is_empty()).then(|| median(&bases)),
    }
}

fn rows(lines: Vec<Line>, outcomes: Vec<Result<Figures, String>>) -> Vec<Row> {
    let of = |side: usize, line: usize| -> Option<Outcome> {
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
                Line {
                    name,
                    unit,
                    base,
                    goals,
                },
            )| Row {
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

/// A size as people say it.
fn size(bytes: u64) -> String {
    if bytes >= 1 << 30 {
        format!("{} GiB", bytes >> 30)
    } else {
        format!("{} MiB", bytes >> 20)
    }
}
