use bytes::Bytes;
use exec_server_protocol::process::{Evicted, OutputStream, ReadChunk};
use proptest::prelude::*;

use super::*;

/// A process as its server knows it: output `n` carries `n % 5` bytes of value `n`.
#[derive(Debug, Clone)]
struct ServerLog {
    /// Number of the last event, which is the close; the first event has number 1.
    closed: u64,
    exited: u64,
    /// Output up to this number is evicted.
    evicted_through: u64,
}

fn chunk(seq: u64) -> Bytes {
    vec![seq as u8; (seq % 5) as usize].into()
}

fn output(seq: u64) -> ExecProcessEvent {
    ExecProcessEvent::Output {
        seq,
        stream: OutputStream::Stdout,
        chunk: chunk(seq),
    }
}

fn exited(seq: u64) -> ExecProcessEvent {
    ExecProcessEvent::Exited {
        seq,
        exit: ProcessExit::with_code(7),
    }
}

fn closed(seq: u64) -> ExecProcessEvent {
    ExecProcessEvent::Closed {
        seq,
        inherited_output: false,
        discarded_bytes: 0,
        descendants: Vec::new(),
    }
}

fn gap(after_seq: u64, through_seq: u64, bytes: Option<u64>) -> ExecProcessEvent {
    ExecProcessEvent::Gap {
        after_seq,
        through_seq,
        bytes,
    }
}

impl ServerLog {
    fn event(&self, seq: u64) -> ExecProcessEvent {
        match seq {
            _ if seq == self.closed => closed(seq),
            _ if seq == self.exited => exited(seq),
            _ => output(seq),
        }
    }

    fn outputs(&self) -> impl Iterator<Item = u64> {
        let exited = self.exited;
        (1..self.closed).filter(move |&seq| seq != exited)
    }

    /// Returns the response of a server whose log reaches up to `written`.
    fn read(
        &self,
        written: u64,
        after: u64,
        max: Option<usize>,
        states_evicted: bool,
    ) -> ReadResult {
        let mut chunks: Vec<ReadChunk> = self
            .outputs()
            .filter(|&seq| seq > after && seq > self.evicted_through && seq <= written)
            .map(|seq| ReadChunk {
                seq,
                stream: OutputStream::Stdout,
                chunk: chunk(seq).into(),
            })
            .collect();
        let mut next_seq = written + 1;
        if let Some(max) = max {
            chunks.truncate(max.max(1));
            next_seq = chunks.last().map_or(next_seq, |last| last.seq + 1);
        }
        let through_seq = self.evicted_through.min(written);
        let gone = self
            .outputs()
            .filter(|&seq| seq > after && seq <= through_seq);
        let bytes = gone.map(|seq| seq % 5).sum();
        let evicted =
            (states_evicted && through_seq > after).then_some(Evicted { through_seq, bytes });
        ReadResult {
            chunks,
            next_seq,
            exited: written >= self.exited,
            exit_code: (written >= self.exited).then_some(7),
            closed: written >= self.closed,
            failure: None,
            sandbox_denied: false,
            evicted,
            exit_signal: None,
            timed_out: false,
        }
    }
}

fn drain(order: &mut EventOrder) -> Vec<ExecProcessEvent> {
    std::iter::from_fn(|| order.poll()).collect()
}

/// Checks that every number is released once and in order, and that only evicted output becomes a
/// gap.
fn check(log: &ServerLog, released: &[ExecProcessEvent]) {
    let mut last = 0;
    let mut exits = 0;
    for event in released {
        match event {
            ExecProcessEvent::Output {
                seq, chunk: bytes, ..
            } => {
                assert_eq!((*seq, bytes), (last + 1, &chunk(*seq)), "{released:?}");
                assert_ne!(*seq, log.exited);
            }
            ExecProcessEvent::Gap {
                after_seq,
                through_seq,
                bytes,
            } => {
                assert_eq!(*after_seq, last, "{released:?}");
                assert!(*through_seq > last && *through_seq <= log.evicted_through);
                let lost = log
                    .outputs()
                    .filter(|seq| seq > after_seq && seq <= through_seq);
                let lost: u64 = lost.map(|seq| seq % 5).sum();
                assert!(bytes.is_none_or(|bytes| bytes == lost), "{released:?}");
            }
            ExecProcessEvent::Exited { seq, exit } => {
                exits += 1;
                assert_eq!(exit.exit_code, 7);
                let in_gap = log.exited <= log.evicted_through;
                assert!(*seq == log.exited || in_gap, "{released:?}");
                if *seq <= last {
                    continue;
                }
                assert_eq!(*seq, last + 1, "{released:?}");
            }
            ExecProcessEvent::Closed { seq, .. } => {
                assert_eq!((*seq, last + 1), (log.closed, *seq))
            }
            ExecProcessEvent::Failed(_) => panic!("{released:?}"),
        }
        last = event.seq().unwrap();
    }
    assert_eq!((last, exits), (log.closed, 1), "{released:?}");
    assert!(matches!(
        released.last(),
        Some(ExecProcessEvent::Closed { .. })
    ));
}

fn logs() -> impl Strategy<Value = ServerLog> {
    (2u64..40)
        .prop_flat_map(|closed| (Just(closed), 1..closed, 0..closed))
        .prop_map(|(closed, exited, evicted_through)| ServerLog {
            closed,
            exited,
            evicted_through,
        })
}

proptest! {
    /// For any order and repetition of events, and any time of the repairs.
    #[test]
    fn released_events_equal_the_log(
        log in logs(),
        evicts: bool,
        states_evicted: bool,
        arrivals in proptest::collection::vec((0u64..40, 0u8..4), 0..80),
        max in proptest::option::of(0usize..6),
    ) {
        let log = ServerLog { evicted_through: if evicts { log.evicted_through } else { 0 }, ..log };
        // A response from a server without `evicted` must not be limited.
        let max = max.filter(|_| states_evicted);
        let mut order = EventOrder::after(0);
        let mut released = Vec::new();
        let mut written = 0;
        let repair = |order: &mut EventOrder, written: u64| {
            let after = order.last();
            let read = log.read(written, after, max, states_evicted);
            order.fill(read, ReadRules { after, states_evicted, make_endings: true });
            drain(order)
        };
        for (number, what) in arrivals {
            let seq = 1 + number % log.closed;
            written = written.max(seq);
            order.accept(log.event(seq));
            released.extend(drain(&mut order));
            if what == 0 && order.has_hole() {
                let last = order.last();
                released.extend(repair(&mut order, written));
                prop_assert!(order.last() > last, "a repair always helps");
            }
        }
        for _ in 0..2 * log.closed {
            if !order.is_closed() {
                released.extend(repair(&mut order, log.closed));
            }
        }
        check(&log, &released);
        // Only an exit that is held within the evicted range can make its size unknown.
        if states_evicted && log.exited > log.evicted_through {
            let hidden = |event: &ExecProcessEvent| {
                matches!(event, ExecProcessEvent::Gap { bytes: None, .. })
            };
            prop_assert!(!released.iter().any(hidden), "{released:?}");
        }
    }

    /// Orders events as in pull mode: output arrives in read responses, exits and closes as
    /// notifications.
    #[test]
    fn read_response_does_not_replace_exit_and_close_notifications(log in logs(), early: bool, max in 0usize..6) {
        let log = ServerLog { evicted_through: 0, ..log };
        let mut order = EventOrder::after(0);
        let mut released = Vec::new();
        if early {
            order.accept(log.event(log.closed));
            order.accept(log.event(log.exited));
            released.extend(drain(&mut order));
        }
        let mut pull = |order: &mut EventOrder| {
            for _ in 0..log.closed {
                let after = order.last();
                let read = log.read(log.closed, after, Some(max), true);
                order.fill(read, ReadRules { after, states_evicted: true, make_endings: false });
                released.extend(drain(order));
            }
        };
        pull(&mut order);
        if !early {
            assert!(order.has_hole());
            order.accept(log.event(log.exited));
            pull(&mut order);
            order.accept(log.event(log.closed));
            pull(&mut order);
        }
        check(&log, &released);
    }
}

#[test]
fn repeated_events_and_events_after_close_are_dropped() {
    let mut order = EventOrder::after(0);
    for event in [
        output(1),
        output(1),
        exited(2),
        closed(3),
        output(4),
        exited(5),
    ] {
        order.accept(event);
    }
    assert_eq!(drain(&mut order), [output(1), exited(2), closed(3)]);
    order.accept(output(4));
    assert_eq!(drain(&mut order), []);
    assert!(!order.has_hole());
}

#[test]
fn events_held_behind_a_gap_above_the_limit_are_dropped_and_read_again() {
    let mut order = EventOrder::after(0);
    for seq in 2..=600 {
        order.accept(output(seq));
        assert!(order.held.len() <= MAX_HELD_EVENTS);
    }
    order.accept(exited(601));
    order.accept(closed(602));
    assert!(order.held.contains_key(&2) && order.held.contains_key(&602));
    assert_eq!(drain(&mut order), []);
    let log = ServerLog {
        closed: 602,
        exited: 601,
        evicted_through: 0,
    };
    let mut released = Vec::new();
    while order.has_hole() {
        let after = order.last();
        let read = log.read(602, after, None, false);
        order.fill(
            read,
            ReadRules {
                after,
                states_evicted: false,
                make_endings: true,
            },
        );
        released.extend(drain(&mut order));
    }
    check(&log, &released);
}

#[test]
fn bytes_held_behind_a_gap_are_bounded() {
    let mut order = EventOrder::after(0);
    for seq in 2..10 {
        let chunk = vec![0; MAX_HELD_BYTES / 4].into();
        order.accept(ExecProcessEvent::Output {
            seq,
            stream: OutputStream::Pty,
            chunk,
        });
    }
    assert!(order.held_bytes <= MAX_HELD_BYTES);
    assert_eq!(order.held.len(), 4);
}

#[test]
fn evicted_output_becomes_a_gap_with_its_size() {
    let log = ServerLog {
        closed: 6,
        exited: 5,
        evicted_through: 3,
    };
    let mut order = EventOrder::after(0);
    order.accept(output(1));
    order.accept(output(4));
    let mut released = drain(&mut order);
    assert!(order.has_hole());
    let read = log.read(4, 1, None, true);
    order.fill(
        read,
        ReadRules {
            after: 1,
            states_evicted: true,
            make_endings: true,
        },
    );
    released.extend(drain(&mut order));
    assert_eq!(released, [output(1), gap(1, 3, Some(2 + 3)), output(4)]);
}

/// Otherwise the held event between the two lost ranges would split them into two gaps, of which
/// only the sum is known.
#[test]
fn output_lost_before_and_after_a_held_event_is_one_gap_of_its_size() {
    let mut order = EventOrder::after(0);
    order.accept(output(1));
    for seq in [5, 6, 9, 10] {
        order.accept(output(seq));
    }
    let log = ServerLog {
        closed: 40,
        exited: 39,
        evicted_through: 8,
    };
    let mut released = drain(&mut order);
    let read = log.read(10, 1, Some(1), true);
    let rules = ReadRules {
        after: 1,
        states_evicted: true,
        make_endings: true,
    };
    order.fill(read, rules);
    released.extend(drain(&mut order));
    let lost = (2..=8).map(|seq| seq % 5).sum();
    assert_eq!(
        released,
        [output(1), gap(1, 8, Some(lost)), output(9), output(10)]
    );
    assert!(!order.has_hole());
}

/// Servers report the sizes of this many events and the total size. The size of the gap follows
/// from the total and the bytes counted here.
#[test]
fn gap_of_a_reader_far_behind_excludes_bytes_already_counted() {
    let far = EVICTED_SIZES + 100;
    let read = |bytes| ReadResult {
        next_seq: far + 1,
        evicted: Some(Evicted {
            through_seq: far,
            bytes,
        }),
        ..ReadResult::default()
    };
    let rules = ReadRules {
        after: 3,
        states_evicted: true,
        make_endings: true,
    };
    let mut order = EventOrder::after(0);
    (1..=3).for_each(|seq| order.accept(output(seq)));
    assert_eq!(drain(&mut order).len(), 3);
    order.fill(read(1_000_006), rules);
    assert_eq!(drain(&mut order), [gap(3, far, Some(1_000_000))]);
    // A consumer that began in the middle does not know how much was lost.
    let mut order = EventOrder::after(3);
    order.fill(read(1_000_006), rules);
    assert_eq!(drain(&mut order), [gap(3, far, None)]);
    // A total below the counted bytes is invalid, so the size of the gap is unknown.
    let mut order = EventOrder::after(0);
    (1..=3).for_each(|seq| order.accept(output(seq)));
    assert_eq!(drain(&mut order).len(), 3);
    order.fill(read(5), rules);
    assert_eq!(drain(&mut order), [gap(3, far, None)]);
}

#[test]
fn exit_within_a_gap_is_released_after_it() {
    let mut order = EventOrder::after(0);
    order.accept(output(5));
    let log = ServerLog {
        closed: 9,
        exited: 2,
        evicted_through: 4,
    };
    let read = log.read(5, 0, None, true);
    order.fill(
        read,
        ReadRules {
            after: 0,
            states_evicted: true,
            make_endings: true,
        },
    );
    assert_eq!(drain(&mut order), [gap(0, 4, Some(1 + 3 + 4)), output(5)]);
    order.accept(exited(2));
    order.accept(exited(2));
    assert_eq!(drain(&mut order), [exited(2)]);
}

#[test]
fn give_up_releases_held_events_with_gaps() {
    let mut order = EventOrder::after(0);
    order.accept(output(2));
    order.accept(output(5));
    order.give_up();
    let expected = [gap(0, 1, None), output(2), gap(2, 4, None), output(5)];
    assert_eq!(drain(&mut order), expected);
}

#[test]
fn extreme_sequence_numbers_do_not_panic_or_overflow() {
    let mut order = EventOrder::after(0);
    order.accept(output(u64::MAX));
    assert_eq!(drain(&mut order), []);
    let log = ServerLog {
        closed: 9,
        exited: 8,
        evicted_through: 0,
    };
    let read = ReadResult {
        next_seq: u64::MAX,
        ..log.read(0, 0, None, false)
    };
    order.fill(
        read,
        ReadRules {
            after: 0,
            states_evicted: false,
            make_endings: true,
        },
    );
    assert_eq!(
        drain(&mut order),
        [gap(0, u64::MAX - 1, None), output(u64::MAX)]
    );
    order.accept(closed(u64::MAX));
    assert!(!order.has_hole());
}
