//! Simulated network that loses, duplicates, delays and reorders frames and cuts sockets, with a
//! simulated clock. Equal seeds give equal runs.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_relay::frame::Transmit;
use exec_server_relay::keys::Authorization;
use exec_server_relay::noise::StaticKeys;
use exec_server_relay::{
    EndReason, Endpoint, EndpointEvent, EndpointLimits, Mode, RelayExecutorConfig,
    RelayHarnessConfig, SendError, StreamKey,
};

pub(crate) const ENVIRONMENT: &str = "env-1";
pub(crate) const REGISTRATION: &str = "registration-1";
pub(crate) const STREAM: &str = "0b2f3c6e-0000-4000-8000-000000000001";

/// Xorshift generator: equal seeds give equal numbers on every machine.
#[derive(Clone)]
pub(crate) struct XorshiftRandom(u64);

impl XorshiftRandom {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03 | 1);
        for _ in 0..8 {
            random.next();
        }
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn fill(&mut self, out: &mut [u8]) {
        for byte in out {
            *byte = self.next() as u8;
        }
    }
}

pub(crate) fn entropy(seed: u64) -> impl FnMut(&mut [u8]) + Send {
    let mut random = XorshiftRandom::new(seed);
    move |out: &mut [u8]| random.fill(out)
}

#[expect(clippy::disallowed_methods, reason = "a fake clock starts somewhere")]
pub(crate) fn epoch() -> Instant {
    Instant::now()
}

pub(crate) fn executor_with(limits: EndpointLimits, seed: u64) -> (Endpoint, StaticKeys) {
    let identity = StaticKeys::generate(&mut entropy(seed));
    let config = RelayExecutorConfig {
        environment_id: ENVIRONMENT.into(),
        registration_id: REGISTRATION.into(),
        identity: identity.clone(),
        limits,
    };
    (
        Endpoint::executor(config, Box::new(entropy(seed + 1))),
        identity,
    )
}

pub(crate) fn harness_with(
    limits: EndpointLimits,
    executor: &StaticKeys,
    stream_id: &str,
    now: Instant,
    seed: u64,
) -> (Endpoint, StreamKey) {
    let mut random = entropy(seed);
    let config = RelayHarnessConfig {
        environment_id: ENVIRONMENT.into(),
        registration_id: REGISTRATION.into(),
        stream_id: stream_id.into(),
        identity: StaticKeys::generate(&mut random),
        executor: executor.public_key().clone(),
        authorization: Authorization::new("test-authorization").unwrap(),
        limits,
    };
    Endpoint::harness(config, now, &mut random).unwrap()
}

/// Faults of the simulated network.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NetworkFaults {
    pub(crate) loss: u64,
    pub(crate) duplication: u64,
    /// Percentage of frames that are delayed, and the longest delay.
    pub(crate) delayed_percent: u64,
    pub(crate) max_extra_delay: Duration,
    pub(crate) delay: Duration,
    /// Whether the rendezvous server reports a lost socket to the other side.
    pub(crate) reports_detachment: bool,
}

pub(crate) const NO_FAULTS: NetworkFaults = NetworkFaults {
    loss: 0,
    duplication: 0,
    delayed_percent: 0,
    max_extra_delay: Duration::ZERO,
    delay: Duration::from_millis(2),
    reports_detachment: true,
};

/// One endpoint with a simulated application.
pub(crate) struct SimulatedEnd {
    pub(crate) endpoint: Endpoint,
    pub(crate) stream: Option<StreamKey>,
    pub(crate) mode: Option<Mode>,
    pub(crate) to_send: VecDeque<Bytes>,
    pub(crate) received: Vec<Bytes>,
    pub(crate) closed: Option<(EndReason, bool)>,
    /// Number of the current socket; frames sent on an earlier one are dropped.
    socket: u64,
    pub(crate) up: bool,
    up_at: Option<Instant>,
    full: bool,
    /// Maximum number of bytes that were ever buffered.
    pub(crate) peak: usize,
    /// Maximum number of messages that are read after each event.
    pub(crate) reads: usize,
    pub(crate) transmitted: u64,
}

impl SimulatedEnd {
    fn new(endpoint: Endpoint, stream: Option<StreamKey>) -> Self {
        Self {
            endpoint,
            stream,
            mode: None,
            to_send: VecDeque::new(),
            received: Vec::new(),
            closed: None,
            socket: 0,
            up: false,
            up_at: None,
            full: false,
            peak: 0,
            reads: usize::MAX,
            transmitted: 0,
        }
    }
}

/// Called with the number of a frame, the end that sent it, and the frame.
pub(crate) type Tamper = Box<dyn FnMut(u64, usize, &mut Vec<u8>)>;

struct InFlight {
    to: usize,
    frame: Vec<u8>,
    /// The sockets at the time of sending.
    sockets: [u64; 2],
}

pub(crate) const HARNESS: usize = 0;
pub(crate) const EXECUTOR: usize = 1;

pub(crate) struct Simulation {
    pub(crate) now: Instant,
    pub(crate) start: Instant,
    pub(crate) random: XorshiftRandom,
    pub(crate) faults: NetworkFaults,
    pub(crate) ends: [SimulatedEnd; 2],
    in_flight_frames: BTreeMap<(Instant, u64), InFlight>,
    next_in_flight: u64,
    pub(crate) delivered: u64,
    /// Cuts the socket of an end after this number of delivered frames.
    pub(crate) cut_at: Option<(u64, usize)>,
    /// Changes frames in transit.
    pub(crate) tamper: Option<Tamper>,
    /// How long an executor takes to decide about admission.
    pub(crate) admission: Duration,
    admit_at: Option<(Instant, StreamKey)>,
    pub(crate) outage: Duration,
}

impl Simulation {
    pub(crate) fn new(seed: u64, faults: NetworkFaults, limits: [EndpointLimits; 2]) -> Self {
        let now = epoch();
        let [harness_limits, executor_limits] = limits;
        let (executor, identity) = executor_with(executor_limits, seed * 10 + 1);
        let (harness, stream) = harness_with(harness_limits, &identity, STREAM, now, seed * 10 + 5);
        let mut simulation = Self {
            now,
            start: now,
            random: XorshiftRandom::new(seed),
            faults,
            ends: [
                SimulatedEnd::new(harness, Some(stream)),
                SimulatedEnd::new(executor, None),
            ],
            in_flight_frames: BTreeMap::new(),
            next_in_flight: 0,
            delivered: 0,
            cut_at: None,
            tamper: None,
            admission: Duration::from_millis(5),
            admit_at: None,
            outage: Duration::from_millis(300),
        };
        for end in &mut simulation.ends {
            end.up = true;
            end.endpoint.socket_up(now);
        }
        simulation
    }

    pub(crate) fn cut(&mut self, at: usize) {
        if !self.ends[at].up {
            return;
        }
        self.ends[at].up = false;
        self.ends[at].socket += 1;
        self.ends[at].endpoint.socket_lost();
        let outage = self.outage + Duration::from_millis(self.random.below(200));
        self.ends[at].up_at = Some(self.now + outage);
        if self.faults.reports_detachment {
            let reason = if at == HARNESS {
                EndReason::HarnessDetached
            } else {
                EndReason::ExecutorDetached
            };
            let reset = Transmit::reset(STREAM, reason.as_str()).to_vec();
            self.launch(1 - at, reset, Duration::from_millis(1));
        }
    }

    fn launch(&mut self, to: usize, frame: Vec<u8>, delay: Duration) {
        self.next_in_flight += 1;
        self.in_flight_frames.insert(
            (self.now + delay, self.next_in_flight),
            InFlight {
                to,
                frame,
                sockets: [self.ends[0].socket, self.ends[1].socket],
            },
        );
    }

    fn pump(&mut self, at: usize) {
        loop {
            let mut idle = true;
            while let Some(event) = self.ends[at].endpoint.poll_event() {
                idle = false;
                self.note(at, event);
            }
            let end = &mut self.ends[at];
            if let (Some(stream), None) = (end.stream, &end.closed) {
                while !end.full
                    && let Some(message) = end.to_send.pop_front()
                {
                    idle = false;
                    match end.endpoint.send_message(self.now, stream, message) {
                        Ok(()) => {}
                        Err(SendError::Full(message)) => {
                            end.to_send.push_front(message);
                            end.full = true;
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                for _ in 0..end.reads {
                    let Some(message) = end.endpoint.read_message(self.now, stream) else {
                        break;
                    };
                    idle = false;
                    end.received.push(message);
                }
            }
            while let Some(transmit) = self.ends[at].endpoint.poll_transmit(self.now) {
                idle = false;
                self.ends[at].transmitted += 1;
                let mut frame = transmit.to_vec();
                if let Some(tamper) = &mut self.tamper {
                    tamper(self.next_in_flight, at, &mut frame);
                }
                let faults = self.faults;
                let copies = 1 + u64::from(self.random.percent(faults.duplication));
                for _ in 0..copies {
                    if self.random.percent(faults.loss) || !self.ends[1 - at].up {
                        continue;
                    }
                    let mut delay = faults.delay;
                    if self.random.percent(faults.delayed_percent) {
                        let most = faults.max_extra_delay.as_micros() as u64 + 1;
                        delay += Duration::from_micros(self.random.below(most));
                    }
                    self.launch(1 - at, frame.clone(), delay);
                }
            }
            let end = &mut self.ends[at];
            end.peak = end.peak.max(end.endpoint.buffered_bytes());
            if idle {
                break;
            }
        }
    }

    fn note(&mut self, at: usize, event: EndpointEvent) {
        let end = &mut self.ends[at];
        match event {
            EndpointEvent::AdmissionRequested {
                stream,
                authorization,
                ..
            } => {
                assert_eq!(authorization.reveal(), "test-authorization");
                self.admit_at = Some((self.now + self.admission, stream));
            }
            EndpointEvent::Opened { stream, mode } => {
                assert!(end.mode.is_none(), "opened twice");
                end.stream = Some(stream);
                end.mode = Some(mode);
            }
            EndpointEvent::Readable(_) => {}
            EndpointEvent::Writable(_) => end.full = false,
            EndpointEvent::Closed {
                reason,
                by_peer,
                unread,
                ..
            } => {
                end.received.extend(unread);
                end.closed = Some((reason, by_peer));
            }
            other => panic!("{other:?}"),
        }
    }

    /// Simulates the next event; returns `false` if no event is left.
    pub(crate) fn step(&mut self) -> bool {
        self.pump(HARNESS);
        self.pump(EXECUTOR);
        let ran = self.run_next_event();
        self.pump(HARNESS);
        self.pump(EXECUTOR);
        ran
    }

    fn run_next_event(&mut self) -> bool {
        let in_flight = self
            .in_flight_frames
            .first_key_value()
            .map(|(&(at, _), _)| at);
        let next = [
            in_flight,
            self.admit_at.map(|(at, _)| at),
            self.ends[0].up_at,
            self.ends[1].up_at,
            self.ends[0].endpoint.next_deadline(),
            self.ends[1].endpoint.next_deadline(),
        ];
        let Some(next) = next.into_iter().flatten().min() else {
            return false;
        };
        self.now = self.now.max(next);
        if let Some((_, stream)) = self.admit_at.take_if(|(at, _)| *at <= self.now) {
            self.ends[EXECUTOR].endpoint.admit(self.now, stream);
        }
        for at in [HARNESS, EXECUTOR] {
            let now = self.now;
            let end = &mut self.ends[at];
            if end.up_at.take_if(|at| *at <= now).is_some() {
                end.up = true;
                end.endpoint.socket_up(now);
            }
            if end.endpoint.next_deadline().is_some_and(|at| at <= now) {
                end.endpoint.handle_timeout(now);
                let next = end.endpoint.next_deadline();
                assert!(next.is_none_or(|at| at > now), "the timer was not reset");
            }
        }
        if let Some(first) = self.in_flight_frames.first_entry()
            && first.key().0 <= self.now
        {
            let in_flight = first.remove();
            let sockets = [self.ends[0].socket, self.ends[1].socket];
            if in_flight.sockets == sockets && self.ends[in_flight.to].up {
                let end = &mut self.ends[in_flight.to];
                let _ = end.endpoint.handle_frame(self.now, &in_flight.frame);
                self.delivered += 1;
                if let Some((_, at)) = self.cut_at.take_if(|(count, _)| *count == self.delivered) {
                    self.cut(at);
                }
            }
        }
        true
    }

    /// Simulates until `done`, for at most `limit` of simulated time.
    pub(crate) fn run(&mut self, limit: Duration, done: impl Fn(&Self) -> bool) -> bool {
        let end = self.now + limit;
        while self.now < end {
            if done(self) {
                return true;
            }
            if !self.step() {
                break;
            }
        }
        done(self)
    }

    pub(crate) fn is_open(&self) -> bool {
        self.ends.iter().all(|end| end.mode.is_some())
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.now - self.start
    }
}

/// Returns numbered messages, from a few bytes to several records long.
pub(crate) fn messages(random: &mut XorshiftRandom, count: usize, max: u64) -> VecDeque<Bytes> {
    (0..count)
        .map(|n| {
            let length = match random.below(4) {
                0 => 8 + random.below(20),
                1 => 8 + random.below(2_000),
                _ => 8 + random.below(max),
            };
            let mut message = vec![0; length as usize];
            random.fill(&mut message);
            message[..8].copy_from_slice(&(n as u64).to_be_bytes());
            message.into()
        })
        .collect()
}
