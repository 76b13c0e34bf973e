//! Bounded queue of events waiting for one process's consumer.
//!
//! The inbox limits the queued bytes and decides what happens when the queue is full. Waiting is
//! done in `route`.

use std::collections::VecDeque;

use exec_server_protocol::process::ReadResult;

use crate::event::{ExecProcessEvent, ProcessFailure};
use crate::order::{EventOrder, ReadRules};

/// Maximum number of bytes that wait for a consumer: about a second of a busy link, and small
/// enough that a hundred idle consumers need little memory.
pub(crate) const MAX_WAITING_BYTES: usize = 4 << 20;

/// Number of waiting bytes below which a paused process continues: half, so that its output arrives
/// again before the consumer has read the rest.
const RESUME_BYTES: usize = MAX_WAITING_BYTES / 2;

/// Maximum number of bytes that wait for a consumer until the server has paused the process: what
/// the buffers of a connection hold at most before the request has an effect, several times over.
const MAX_OVERSHOOT_BYTES: usize = 32 << 20;

/// Cost added for each event beside its bytes, so that many tiny chunks are limited too.
const EVENT_COST: usize = 128;

/// Ordered events of one process that its consumer has not read yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    order: EventOrder,
    queue: VecDeque<ExecProcessEvent>,
    /// Sum of the costs of the queued events.
    cost: usize,
    consumer: Consumer,
    /// Whether the server can pause the process.
    can_pause: bool,
    /// Whether the client has requested to pause the process.
    is_paused: bool,
    /// Failure after which no further event is accepted.
    failure: Option<ProcessFailure>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Consumer {
    /// The process was started a moment ago: the consumer is about to attach. Treated as attached if
    /// the server can pause the process.
    #[default]
    Expected,
    /// No consumer attached in time: the latest events are kept, and the process does not wait.
    Absent,
    /// Attached: the queue is limited, and no output is discarded.
    Attached,
    /// Detached: no events are kept.
    Gone,
}

impl Inbox {
    /// Creates an inbox that begins after a sequence number; 0 for a new process.
    pub(crate) fn after(last: u64) -> Self {
        Self {
            order: EventOrder::after(last),
            ..Self::default()
        }
    }

    pub(crate) fn order(&self) -> &EventOrder {
        &self.order
    }

    /// Returns whether the queue has reached its limit: reads of missing output wait, and the server
    /// pauses the process on request.
    pub(crate) fn is_full(&self) -> bool {
        self.keeps_all() && self.cost >= MAX_WAITING_BYTES && self.failure.is_none()
    }

    /// Returns whether output must not be discarded.
    fn keeps_all(&self) -> bool {
        match self.consumer {
            Consumer::Expected => self.can_pause,
            Consumer::Attached => true,
            Consumer::Absent | Consumer::Gone => false,
        }
    }

    /// Returns whether output that the server has pushed must wait, and with it all later messages of
    /// the connection.
    ///
    /// Returns false if the server pauses the process instead. It returns true nevertheless if the
    /// server sends too much, or if output is missing, because held output would be discarded then.
    pub(crate) fn must_wait(&self) -> bool {
        let bounded = self.can_pause && self.cost < MAX_OVERSHOOT_BYTES && !self.order.has_hole();
        self.is_full() && !bounded
    }

    /// Returns whether the client must request to pause (`true`) or to continue (`false`) the process.
    pub(crate) fn pause_due(&self) -> Option<bool> {
        if self.is_paused {
            let has_room = self.cost < RESUME_BYTES || !self.keeps_all();
            (has_room || self.is_finished()).then_some(false)
        } else {
            (self.can_pause && self.is_full() && !self.is_finished()).then_some(true)
        }
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused
    }

    pub(crate) fn set_paused(&mut self, paused: bool) {
        self.is_paused = paused;
    }

    pub(crate) fn set_can_pause(&mut self, can_pause: bool) {
        self.can_pause = can_pause;
    }

    /// Returns whether no further event can arrive.
    pub(crate) fn is_finished(&self) -> bool {
        self.failure.is_some() || self.order.is_closed()
    }

    pub(crate) fn accept(&mut self, event: ExecProcessEvent) {
        if self.failure.is_some() {
            return;
        }
        match self.order.pass(event) {
            Ok(event) => self.push(event),
            Err(event) => {
                self.order.accept(event);
                self.release();
            }
        }
    }

    pub(crate) fn fill(&mut self, read: ReadResult, rules: ReadRules) {
        if self.failure.is_none() {
            self.order.fill(read, rules);
            self.release();
        }
    }

    /// Ends the stream with a failure, unless it has already ended.
    pub(crate) fn fail(&mut self, failure: ProcessFailure) {
        if self.is_finished() {
            return;
        }
        self.order.give_up();
        self.release();
        if !self.order.is_closed() {
            self.push(ExecProcessEvent::Failed(failure.clone()));
            self.failure = Some(failure);
        }
    }

    pub(crate) fn take(&mut self) -> Option<ExecProcessEvent> {
        let event = self.queue.pop_front()?;
        self.cost -= cost(&event);
        Some(event)
    }

    /// Attaches the consumer; returns `false` if one was attached before.
    pub(crate) fn attach(&mut self) -> bool {
        let first = !self.has_had_consumer();
        if first {
            self.consumer = Consumer::Attached;
        }
        first
    }

    pub(crate) fn has_had_consumer(&self) -> bool {
        matches!(self.consumer, Consumer::Attached | Consumer::Gone)
    }

    /// Stops holding back the process for a consumer that has not attached.
    pub(crate) fn stop_expecting(&mut self) {
        if self.consumer == Consumer::Expected {
            self.consumer = Consumer::Absent;
            self.limit();
        }
    }

    pub(crate) fn detach(&mut self) {
        self.consumer = Consumer::Gone;
        self.queue.clear();
        self.cost = 0;
    }

    fn release(&mut self) {
        while let Some(event) = self.order.poll() {
            self.push(event);
        }
    }

    fn push(&mut self, event: ExecProcessEvent) {
        if self.consumer == Consumer::Gone {
            return;
        }
        self.cost += cost(&event);
        self.queue.push_back(event);
        self.join(self.queue.len() - 1);
        self.limit();
    }

    /// Discards the oldest output above the limit, if there is no consumer.
    fn limit(&mut self) {
        while !self.has_had_consumer() && !self.keeps_all() && self.cost > MAX_WAITING_BYTES {
            if !self.evict() {
                return;
            }
        }
    }

    /// Replaces the oldest output by a gap, or extends the gap before it.
    fn evict(&mut self) -> bool {
        let is_output = |event: &ExecProcessEvent| matches!(event, ExecProcessEvent::Output { .. });
        let Some(at) = self.queue.iter().position(is_output) else {
            return false;
        };
        let Some(ExecProcessEvent::Output { seq, chunk, .. }) = self.queue.remove(at) else {
            return false;
        };
        let lost = chunk.len() as u64;
        self.cost -= chunk.len() + EVENT_COST;
        let gap = ExecProcessEvent::Gap {
            after_seq: seq - 1,
            through_seq: seq,
            bytes: Some(lost),
        };
        self.cost += cost(&gap);
        self.queue.insert(at, gap);
        self.join(at + 1);
        self.join(at);
        true
    }

    /// Joins the event at this index and the one before it if both are adjacent gaps. The size of
    /// the joined gap is known if both sizes were known.
    fn join(&mut self, at: usize) {
        let Some(ExecProcessEvent::Gap {
            after_seq: middle,
            through_seq: end,
            bytes: more,
        }) = self.queue.get(at).cloned()
        else {
            return;
        };
        let before = at.checked_sub(1).and_then(|at| self.queue.get_mut(at));
        if let Some(ExecProcessEvent::Gap {
            through_seq, bytes, ..
        }) = before
            && *through_seq == middle
        {
            *through_seq = end;
            *bytes = bytes
                .zip(more)
                .map(|(bytes, more)| bytes.saturating_add(more));
            self.queue.remove(at);
            self.cost -= EVENT_COST;
        }
    }
}

fn cost(event: &ExecProcessEvent) -> usize {
    event.bytes() + EVENT_COST
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::process::{Evicted, OutputStream, ReadChunk};

    use super::*;

    const CHUNK: usize = 1 << 20;

    fn output(seq: u64) -> ExecProcessEvent {
        ExecProcessEvent::Output {
            seq,
            stream: OutputStream::Stdout,
            chunk: vec![0; CHUNK].into(),
        }
    }

    fn numbers(inbox: &mut Inbox) -> Vec<Option<u64>> {
        std::iter::from_fn(|| inbox.take())
            .map(|event| event.seq())
            .collect()
    }

    #[test]
    fn inbox_without_consumer_replaces_oldest_output_by_gap() {
        let mut inbox = Inbox::default();
        for seq in 1..=10 {
            inbox.accept(output(seq));
            assert!(!inbox.is_full());
        }
        assert!(inbox.attach());
        let gap = ExecProcessEvent::Gap {
            after_seq: 0,
            through_seq: 7,
            bytes: Some(7 * CHUNK as u64),
        };
        assert_eq!(inbox.take(), Some(gap));
        assert_eq!(numbers(&mut inbox), [Some(8), Some(9), Some(10)]);
        assert_eq!(inbox.cost, 0);
    }

    /// Locally evicted output and output that the server evicted become one gap when they are
    /// adjacent.
    #[test]
    fn inbox_joins_adjacent_gaps() {
        for known in [true, false] {
            let mut inbox = Inbox::default();
            for seq in 1..=10 {
                inbox.accept(output(seq));
            }
            // The server has evicted the output between two connections.
            let read = ReadResult {
                next_seq: 31,
                chunks: vec![ReadChunk {
                    seq: 30,
                    stream: OutputStream::Stdout,
                    chunk: vec![0; CHUNK].into(),
                }],
                evicted: known.then_some(Evicted {
                    through_seq: 29,
                    bytes: 1234,
                }),
                ..ReadResult::default()
            };
            let rules = ReadRules {
                after: 10,
                states_evicted: known,
                make_endings: true,
            };
            inbox.fill(read, rules);
            for seq in 31..=40 {
                inbox.accept(output(seq));
            }
            assert!(inbox.attach());
            let gap = ExecProcessEvent::Gap {
                after_seq: 0,
                through_seq: 37,
                bytes: known.then_some(1234 + 18 * CHUNK as u64),
            };
            assert_eq!(inbox.take(), Some(gap));
            assert_eq!(numbers(&mut inbox), [Some(38), Some(39), Some(40)]);
            assert_eq!(inbox.cost, 0);
        }
    }

    #[test]
    fn inbox_with_consumer_is_full_at_limit_until_read() {
        let mut inbox = Inbox::default();
        assert!(inbox.attach());
        assert!(!inbox.attach());
        for seq in 1..=4 {
            assert!(!inbox.is_full());
            inbox.accept(output(seq));
        }
        assert!(inbox.is_full());
        inbox.take();
        assert!(!inbox.is_full());
    }

    #[test]
    fn full_inbox_is_paused_instead_of_blocking_and_continues_at_half() {
        let mut inbox = Inbox::default();
        inbox.attach();
        inbox.set_can_pause(true);
        let mut seq = 0;
        while inbox.pause_due().is_none() {
            seq += 1;
            inbox.accept(output(seq));
        }
        assert!(inbox.is_full() && !inbox.must_wait());
        assert_eq!(inbox.pause_due(), Some(true));
        inbox.set_paused(true);
        // Events that the server sent before the pause are accepted, up to a limit.
        while !inbox.must_wait() {
            seq += 1;
            inbox.accept(output(seq));
        }
        assert!(inbox.cost >= MAX_OVERSHOOT_BYTES);
        assert_eq!(inbox.pause_due(), None);
        let mut next = 1;
        while inbox.pause_due().is_none() {
            assert_eq!(inbox.take().and_then(|event| event.seq()), Some(next));
            next += 1;
        }
        assert_eq!(inbox.pause_due(), Some(false));
        assert!(inbox.cost < RESUME_BYTES && inbox.cost > 0);
    }

    #[test]
    fn inbox_pauses_for_an_expected_consumer_and_discards_only_without_one() {
        let mut inbox = Inbox::default();
        inbox.set_can_pause(true);
        for seq in 1..=5 {
            inbox.accept(output(seq));
        }
        assert_eq!(inbox.pause_due(), Some(true));
        assert!(!inbox.must_wait());
        inbox.set_paused(true);
        assert!(inbox.attach());
        assert_eq!(inbox.pause_due(), None);
        assert_eq!(inbox.take().and_then(|event| event.seq()), Some(1));

        let mut inbox = Inbox::default();
        inbox.set_can_pause(true);
        for seq in 1..=5 {
            inbox.accept(output(seq));
        }
        inbox.set_paused(true);
        inbox.stop_expecting();
        assert_eq!(inbox.pause_due(), Some(false));
        assert!(inbox.attach());
        let first = inbox.take();
        assert!(
            matches!(first, Some(ExecProcessEvent::Gap { after_seq: 0, .. })),
            "{first:?}"
        );
    }

    #[test]
    fn full_inbox_blocks_while_output_is_missing_or_server_cannot_pause() {
        let mut inbox = Inbox::default();
        inbox.attach();
        for seq in 1..=4 {
            inbox.accept(output(seq));
        }
        assert!(inbox.must_wait());
        assert_eq!(inbox.pause_due(), None);
        inbox.set_can_pause(true);
        assert!(!inbox.must_wait());
        inbox.accept(output(6));
        assert!(inbox.must_wait());
    }

    #[test]
    fn paused_inbox_without_consumer_continues() {
        let mut inbox = Inbox::default();
        inbox.attach();
        inbox.set_can_pause(true);
        for seq in 1..=4 {
            inbox.accept(output(seq));
        }
        inbox.set_paused(true);
        assert_eq!(inbox.pause_due(), None);
        inbox.detach();
        assert_eq!(inbox.pause_due(), Some(false));
    }

    #[test]
    fn inbox_limit_counts_each_tiny_chunk() {
        let mut inbox = Inbox::default();
        inbox.attach();
        let mut seq = 0;
        while !inbox.is_full() {
            seq += 1;
            let chunk = b"x".as_slice().into();
            inbox.accept(ExecProcessEvent::Output {
                seq,
                stream: OutputStream::Stdout,
                chunk,
            });
        }
        assert!(seq < 50_000, "{seq}");
    }

    #[test]
    fn inbox_with_detached_consumer_keeps_no_events() {
        let mut inbox = Inbox::default();
        inbox.attach();
        for seq in 1..=20 {
            if seq == 3 {
                inbox.detach();
            }
            inbox.accept(output(seq));
        }
        assert!(!inbox.is_full());
        assert_eq!((inbox.cost, inbox.order().last()), (0, 20));
    }

    #[test]
    fn inbox_failure_follows_queued_events_once() {
        let mut inbox = Inbox::default();
        let failure = ProcessFailure::ConnectionClosed("gone".into());
        inbox.accept(output(1));
        inbox.accept(output(3));
        inbox.fail(failure.clone());
        inbox.fail(failure);
        inbox.accept(output(4));
        assert_eq!(numbers(&mut inbox), [Some(1), Some(2), Some(3), None]);
    }

    #[test]
    fn inbox_ignores_failure_after_close() {
        let mut inbox = Inbox::default();
        inbox.accept(ExecProcessEvent::Closed {
            seq: 1,
            inherited_output: false,
            discarded_bytes: 0,
            descendants: Vec::new(),
        });
        inbox.fail(ProcessFailure::ConnectionClosed("gone".into()));
        assert_eq!(numbers(&mut inbox), [Some(1)]);
    }
}
