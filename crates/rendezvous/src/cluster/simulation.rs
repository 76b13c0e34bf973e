//! Simulation of the rules in [`super::rules`]: many nodes and environments under one seeded
//! scheduler, with network partitions, delays, pauses, and clocks with offset and drift.
//!
//! The log is one list. Each node reads it in order, with delays, and not at all while it is
//! disconnected or paused. Its writes are delayed too. After every step the simulation checks:
//!
//! - a node accepts a connection only with a view that is fresh enough: its claim is the newest of all
//!   claims written up to the age that the lease allows;
//! - a node gives a superseded claim up permanently as soon as it sees the newer one;
//! - a claim for an older registration never overwrites one for a newer registration.
//!
//! At the end, after a period without faults, all nodes must route to the same node: the owner of
//! the newest claim, if that node is alive.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::rules::{Claim, ClaimChange, ClusterRules, ExecutorRoute, Timing};

/// SplitMix64 random generator: short, and the same sequence on every platform.
struct SimulationRandom(u64);

impl SimulationRandom {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, odds: u64) -> bool {
        self.below(odds) == 0
    }
}

#[derive(Clone)]
enum LogRecord {
    Lease(Arc<str>, u64),
    Claim(Arc<str>, Option<Claim>),
}

/// A write in flight. It reaches the log after its delay, once its node is connected.
struct WriteInFlight {
    at: u64,
    entry: LogRecord,
    /// For a claim, the number of its socket; for a removal, the revision of the claim to remove.
    socket: u64,
}

struct SimulatedNode {
    rules: ClusterRules,
    /// Clock of the node: its offset, and its speed in thousandths.
    offset: u64,
    rate: u64,
    /// Number of log entries that the node has read.
    seen: usize,
    beat: u64,
    next_beat: u64,
    writes: VecDeque<WriteInFlight>,
    /// Until when the node is disconnected, and until when it is paused.
    cut_off: u64,
    paused: u64,
    alive: bool,
    /// Delay until a log entry reaches the node.
    delay: u64,
    /// Environments whose executor is connected here, with the number of the socket.
    sockets: HashMap<Arc<str>, u64>,
}

struct ClusterWorld {
    random: SimulationRandom,
    base: Instant,
    /// True time in milliseconds.
    now: u64,
    /// The log: write time and entry. The revision is the index plus one.
    log: Vec<(u64, LogRecord)>,
    nodes: Vec<SimulatedNode>,
    environments: Vec<Arc<str>>,
    registered: HashMap<Arc<str>, u64>,
    sockets: u64,
    timing: Timing,
    accepted: u64,
    fenced: u64,
}

impl ClusterWorld {
    fn new(seed: u64, nodes: usize, environments: usize) -> Self {
        let mut random = SimulationRandom(seed);
        let timing = Timing::default();
        let name = |n: usize| -> Arc<str> { format!("node-{n}").into() };
        let nodes = (0..nodes)
            .map(|n| SimulatedNode {
                rules: ClusterRules::new(name(n), timing),
                // Clock offset up to ten minutes, drift up to two percent.
                offset: random.below(600_000),
                rate: 980 + random.below(41),
                seen: 0,
                beat: 0,
                next_beat: random.below(700),
                writes: VecDeque::new(),
                cut_off: 0,
                paused: 0,
                alive: true,
                delay: 1 + random.below(30),
                sockets: HashMap::new(),
            })
            .collect();
        Self {
            random,
            base: Instant::now(),
            now: 0,
            log: Vec::new(),
            nodes,
            environments: (0..environments).map(|n| format!("e{n}").into()).collect(),
            registered: HashMap::new(),
            sockets: 0,
            timing,
            accepted: 0,
            fenced: 0,
        }
    }

    /// Time that a node's clock shows.
    fn clock(&self, node: usize) -> Instant {
        let node = &self.nodes[node];
        self.base + Duration::from_millis(node.offset + self.now * node.rate / 1000)
    }

    fn newest_claim(&self, environment: &str) -> Option<(u64, u64, Option<Claim>)> {
        let found = self.log.iter().enumerate().rev();
        let mut found = found.filter_map(|(index, (at, entry))| match entry {
            LogRecord::Claim(it, claim) if **it == *environment => {
                Some((index as u64 + 1, *at, claim.clone()))
            }
            _ => None,
        });
        found.next()
    }

    /// Connects an executor to a node.
    fn attach(&mut self, environment: usize, node: usize, newer_registration: bool) {
        let environment = Arc::clone(&self.environments[environment]);
        let revision = self.log.len() as u64;
        let registered = self.registered.entry(Arc::clone(&environment)).or_insert(1);
        if newer_registration {
            *registered = (*registered).max(revision) + 1;
        }
        let registered = *registered;
        let clock = self.clock(node);
        let delay = 1 + self.random.below(200);
        self.sockets += 1;
        let (socket, at) = (self.sockets, self.now + delay);
        let node = &mut self.nodes[node];
        if !node.alive || node.paused > self.now || !node.rules.is_fresh(clock) {
            return;
        }
        let claim = Claim {
            node: Arc::clone(node.rules.node()),
            registration: format!("r{registered}").into(),
            registered,
        };
        node.writes.push_back(WriteInFlight {
            at,
            entry: LogRecord::Claim(environment, Some(claim)),
            socket,
        });
    }

    /// Closes an executor's socket.
    fn detach(&mut self, environment: usize, node: usize) {
        let environment = Arc::clone(&self.environments[environment]);
        let at = self.now + 1 + self.random.below(100);
        let node = &mut self.nodes[node];
        if let Some(socket) = node.sockets.remove(&environment)
            && let Some(revision) = node.rules.release(&environment, socket)
        {
            node.writes.push_back(WriteInFlight {
                at,
                entry: LogRecord::Claim(environment, None),
                socket: revision,
            });
        }
    }

    fn step_node(&mut self, node: usize) {
        let clock = self.clock(node);
        let now = self.now;
        if !self.nodes[node].alive || self.nodes[node].paused > now {
            return;
        }
        let reachable = self.nodes[node].cut_off <= now;
        if self.nodes[node].next_beat <= now {
            let delay = 1 + self.random.below(100);
            let it = &mut self.nodes[node];
            it.next_beat = now + 700 * 1000 / it.rate;
            it.beat += 1;
            it.rules.record_renewal_sent(it.beat, clock);
            let entry = LogRecord::Lease(Arc::clone(it.rules.node()), it.beat);
            it.writes.push_back(WriteInFlight {
                at: now + delay,
                entry,
                socket: 0,
            });
        }
        if reachable {
            self.write(node, clock);
            self.read(node, clock);
        }
        let it = &mut self.nodes[node];
        it.rules.expire_members(clock);
        self.check(node, clock);
    }

    /// Applies due writes. Like a bucket, the log accepts a write only over the revision that its
    /// writer has just read.
    fn write(&mut self, node: usize, clock: Instant) {
        while let Some(write) = self.nodes[node].writes.front()
            && write.at <= self.now
        {
            let Some(write) = self.nodes[node].writes.pop_front() else {
                return;
            };
            let revision = self.log.len() as u64 + 1;
            if let LogRecord::Claim(environment, claim) = &write.entry {
                let current = self.newest_claim(environment);
                match claim {
                    Some(claim) => {
                        let before = current.and_then(|(_, _, claim)| claim);
                        if !claim.may_follow(before.as_ref()) {
                            continue;
                        }
                        let it = &mut self.nodes[node];
                        let claimed = it.rules.claimed(
                            environment,
                            write.socket,
                            revision,
                            claim.clone(),
                            clock,
                        );
                        assert!(claimed, "the newest cannot be superseded");
                        it.sockets.insert(Arc::clone(environment), write.socket);
                    }
                    // Removes the claim only if it is still the same one.
                    None if current.is_none_or(|(newest, ..)| newest != write.socket) => continue,
                    None => {}
                }
            }
            self.log.push((self.now, write.entry));
        }
    }

    fn read(&mut self, node: usize, clock: Instant) {
        let it = &mut self.nodes[node];
        while let Some((at, entry)) = self.log.get(it.seen)
            && at + it.delay <= self.now
        {
            it.seen += 1;
            let revision = it.seen as u64;
            match entry {
                LogRecord::Lease(name, beat) if name == it.rules.node() => {
                    it.rules.record_renewal_read(*beat, clock);
                }
                LogRecord::Lease(name, _) => it.rules.lease(name, revision, false, clock),
                LogRecord::Claim(environment, claim) => {
                    let change = it.rules.claim(environment, revision, claim.clone(), clock);
                    if change == ClaimChange::Fenced {
                        self.fenced += 1;
                        it.sockets.remove(environment);
                        assert!(!it.rules.holds(environment, revision - 1, clock));
                    }
                }
            }
        }
    }

    fn check(&mut self, node: usize, clock: Instant) {
        for environment in self.environments.clone() {
            let it = &self.nodes[node];
            let ExecutorRoute::Local { epoch } = it.rules.route(&environment, clock) else {
                continue;
            };
            assert!(it.rules.holds(&environment, epoch, clock));
            self.accepted += 1;
            let (newest, written, _) = self.newest_claim(&environment).unwrap();
            // A node that accepts a connection has the newest claim, or the newer claim is not
            // older than the maximum age of a view, measured by a clock that may be two percent
            // slow.
            let allowed = self.timing.own.as_millis() as u64 * 103 / 100;
            assert!(
                newest == epoch || self.now - written <= allowed,
                "node {node} accepts a connection for {environment} by claim {epoch}, {} ms after claim {newest}",
                self.now - written
            );
        }
    }

    fn inject_fault(&mut self) {
        let count = self.nodes.len() as u64;
        let node = self.random.below(count) as usize;
        let long = self.now + 100 + self.random.below(20_000);
        match self.random.below(6) {
            0 => self.nodes[node].cut_off = long,
            1 => self.nodes[node].paused = long,
            2 => self.nodes[node].delay = 1 + self.random.below(2_000),
            3 => self.nodes[node].delay = 1 + self.random.below(20),
            4 if self.nodes.iter().filter(|node| node.alive).count() > 2 => {
                // The node dies with all its sockets.
                self.nodes[node].alive = false;
            }
            _ => {}
        }
    }

    fn run(&mut self, millis: u64, troubled: bool) {
        let end = self.now + millis;
        while self.now < end {
            self.now += 10;
            let environments = self.environments.len() as u64;
            if self.random.one_in(20) {
                let environment = self.random.below(environments) as usize;
                let node = self.random.below(self.nodes.len() as u64) as usize;
                let newer = self.random.one_in(5);
                self.attach(environment, node, newer);
            }
            if self.random.one_in(60) {
                let environment = self.random.below(environments) as usize;
                let node = self.random.below(self.nodes.len() as u64) as usize;
                self.detach(environment, node);
            }
            if troubled && self.random.one_in(100) {
                self.inject_fault();
            }
            for node in 0..self.nodes.len() {
                self.step_node(node);
            }
        }
    }

    /// Runs without faults and without changes; in the end all nodes must agree.
    fn settle(&mut self) {
        for node in &mut self.nodes {
            (node.cut_off, node.paused) = (0, 0);
            node.delay = node.delay.min(20);
        }
        let end = self.now + 20_000;
        while self.now < end {
            self.now += 10;
            for node in 0..self.nodes.len() {
                self.step_node(node);
            }
        }
        for environment in self.environments.clone() {
            let newest = self.newest_claim(&environment);
            let expected = newest.and_then(|(epoch, _, claim)| Some((epoch, claim?)));
            let expected = expected.filter(|(epoch, claim)| {
                self.nodes.iter().any(|node| {
                    node.alive
                        && *node.rules.node() == claim.node
                        && node.rules.own_socket(&environment).is_some()
                        && *epoch > 0
                })
            });
            for node in 0..self.nodes.len() {
                if !self.nodes[node].alive {
                    continue;
                }
                let clock = self.clock(node);
                let own = Arc::clone(self.nodes[node].rules.node());
                match (self.nodes[node].rules.route(&environment, clock), &expected) {
                    (ExecutorRoute::Local { epoch }, Some((newest, claim))) => {
                        assert_eq!((epoch, &own), (*newest, &claim.node), "{environment}");
                    }
                    (ExecutorRoute::Remote { claim, epoch }, Some((newest, expected))) => {
                        assert_eq!((epoch, &claim), (*newest, expected), "{environment}");
                    }
                    (ExecutorRoute::Unattached { .. }, None) => {}
                    (route, expected) => {
                        panic!("{own}: {environment} is {route:?}, expected {expected:?}")
                    }
                }
            }
        }
    }
}

#[test]
fn nodes_agree_after_partitions_pauses_and_clock_drift() {
    let (mut accepted, mut fenced) = (0, 0);
    for seed in 0..60 {
        let mut world = ClusterWorld::new(seed, 3 + (seed % 6) as usize, 12);
        world.run(5_000, false);
        world.run(60_000, true);
        world.settle();
        accepted += world.accepted;
        fenced += world.fenced;
    }
    // Shows that the simulation did accept connections.
    assert!(accepted > 10_000, "{accepted}");
    assert!(fenced > 500, "{fenced}");
}

#[test]
fn simulation_detects_a_lease_that_is_too_long() {
    // With a lease of one hour some node acts on an old view, and the check must detect that.
    let lax = std::panic::catch_unwind(|| {
        for seed in 0..20 {
            let mut world = ClusterWorld::new(seed, 5, 6);
            let timing = Timing {
                own: Duration::from_secs(3600),
                others: Duration::from_secs(7200),
                ..Timing::default()
            };
            for (n, node) in world.nodes.iter_mut().enumerate() {
                node.rules = ClusterRules::new(format!("node-{n}").into(), timing);
            }
            world.run(60_000, true);
        }
    });
    assert!(lax.is_err());
}
