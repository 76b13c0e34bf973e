//! The order of one process's events.
//!
//! Owns which numbers were released, what is held back behind a missing one, and how an answer to
//! `process/read` stands in for events that did not come. Knows no connection, clock or consumer.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use exec_server_protocol::limits::EVICTED_SIZES;
use exec_server_protocol::process::{Evicted, ReadResult};

use crate::event::{ExecProcessEvent, ProcessExit};

/// Events held back behind a missing one; what compatible clients allow.
pub(crate) const MAX_HELD_EVENTS: usize = 256;

/// Bytes held back behind a missing event; as much as a server retains at least, so that what is
/// dropped beyond it can be read again.
pub(crate) const MAX_HELD_BYTES: usize = 1 << 20;

/// Puts events into order, drops repeats and knows when one is missing.
///
/// ```text
///   accept, fill ──► held (by number) ──► poll: the next number, as long as it is there
///                        │
///                        └─ the next number is not there: hole() ──► process/read ──► fill
/// ```
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// Every number up to here was released.
    last: u64,
    /// The highest number heard of.
    seen: u64,
    /// What came too early, and what is about to be released, by its first number.
    held: BTreeMap<u64, ExecProcessEvent>,
    /// Bytes of output in `held`.
    held_bytes: usize,
    exit: ExitState,
    /// The log is closed and its last event released.
    closed: bool,
    /// Bytes of all output that was released or stated as a gap.
    counted: u64,
    /// Some of it could not be counted: a gap of unknown size, or what was before the beginning.
    uncounted: bool,
}

#[derive(Debug, Default)]
enum ExitState {
    /// Nothing is known; or the event is held, waiting for its number.
    #[default]
    Ahead,
    /// Known only from an answer, without a number of its own: it has to come before `Closed`.
    Told(ProcessExit),
    /// Its number was passed by a gap: to be released at once.
    Late {
        seq: u64,
        exit: ProcessExit,
    },
    Released,
}

/// How to understand an answer to `process/read`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadRules {
    /// What the read asked for as `afterSeq`.
    pub(crate) after: u64,
    /// The server says in `evicted` what is gone. If not, the read must not have been cut short by
    /// `maxBytes`: only the whole picture tells an exit from evicted output.
    pub(crate) states_evicted: bool,
    /// Make `Exited` and `Closed` from the answer, instead of leaving their numbers to the
    /// notifications, which say more.
    pub(crate) make_endings: bool,
}

impl Order {
    /// Begins after a number; 0 for a new process.
    pub(crate) fn after(last: u64) -> Self {
        Self {
            last,
            seen: last,
            uncounted: last > 0,
            ..Self::default()
        }
    }

    /// The number of the last event that was released.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// `Closed` was released: there is nothing to wait for.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether a later event is known of while the next one has not come. Poll first.
    pub(crate) fn has_hole(&self) -> bool {
        !self.closed && self.seen > self.last && !self.held.contains_key(&self.next())
    }

    /// An event arrived; to be followed by [`Order::poll`] until there is nothing.
    pub(crate) fn accept(&mut self, event: ExecProcessEvent) {
        let Some(seq) = event.seq() else { return };
        if self.closed {
            return;
        }
        if seq <= self.last {
            if let ExecProcessEvent::Exited { seq, exit } = event
                && matches!(self.exit, ExitState::Ahead | ExitState::Told(_))
                && !self.holds_exit()
            {
                self.exit = ExitState::Late { seq, exit };
            }
            return;
        }
        self.seen = self.seen.max(seq);
        self.hold(seq, event);
        if seq != self.next() {
            self.trim();
        }
    }

    /// An event arrived that may be released at once: the usual case, without looking at anything
    /// held. Gives it back if that is not so.
    pub(crate) fn pass(
        &mut self,
        event: ExecProcessEvent,
    ) -> Result<ExecProcessEvent, ExecProcessEvent> {
        match &event {
            ExecProcessEvent::Output { seq, .. }
                if *seq == self.next()
                    && self.held.is_empty()
                    && !self.closed
                    && !matches!(self.exit, ExitState::Late { .. }) =>
            {
                self.last = *seq;
                self.seen = self.seen.max(*seq);
                self.count(&event);
                Ok(event)
            }
            _ => Err(event),
        }
    }

    /// An answer to `process/read` arrived; to be followed by [`Order::poll`] until there is nothing.
    ///
    /// Afterwards every number that the answer accounts for can be released, as output, ending or
    /// gap, except for endings that the rules leave to the notifications.
    pub(crate) fn fill(&mut self, read: ReadResult, rules: ReadRules) {
        if self.closed {
            return;
        }
        let through = read.next_seq.saturating_sub(1);
        self.seen = self.seen.max(through);
        let exit = ProcessExit::from_read(&read);
        let evicted = read.evicted;
        for chunk in read.chunks {
            if chunk.seq > self.last {
                self.seen = self.seen.max(chunk.seq);
                self.hold(chunk.seq, chunk.into());
            }
        }
        let mut missing = self.missing(through);
        if rules.make_endings {
            // Closing is always the last number. An answer that was cut short by `maxBytes` ends
            // with output, which is held by now.
            if read.closed && end_of(&missing) == Some(through) {
                let closed = ExecProcessEvent::Closed {
                    seq: through,
                    inherited_output: false,
                    discarded_bytes: 0,
                };
                self.hold(through, closed);
                drop_last(&mut missing);
            }
            if let Some(exit) = exit
                && matches!(self.exit, ExitState::Ahead | ExitState::Told(_))
                && !self.holds_exit()
            {
                // Servers evict from the front: of the missing numbers the last is the exit's.
                let gone = match evicted {
                    Some(evicted) if rules.states_evicted => evicted.through_seq,
                    _ => 0,
                };
                match end_of(&missing) {
                    Some(seq) if seq > gone => {
                        self.hold(seq, ExecProcessEvent::Exited { seq, exit });
                        drop_last(&mut missing);
                    }
                    _ => self.exit = ExitState::Told(exit),
                }
            }
        }
        let gone = evicted.map_or(0, |evicted| evicted.through_seq);
        let evicted = evicted.filter(|_| rules.after == self.last);
        if evicted.is_some() && runs_through(&missing, gone) > 1 && self.forget_output(gone) {
            missing = self.missing(through);
        }
        let lost = evicted
            .filter(|_| runs_through(&missing, gone) == 1)
            .and_then(|evicted| self.lost(evicted))
            .and_then(|lost| lost.checked_sub(self.held_bytes_through(gone)));
        for range in missing {
            let (start, mut end) = range.into_inner();
            if !rules.make_endings {
                end = end.min(gone);
            }
            if start <= end {
                self.hold_gap(start..=end, lost.filter(|_| start <= gone));
            }
        }
    }

    /// Stops waiting for what is missing: it becomes gaps between what is held.
    pub(crate) fn give_up(&mut self) {
        let Some(end) = self.held.last_key_value().map(|(&start, _)| start) else {
            return;
        };
        for range in self.missing(end) {
            self.hold_gap(range, None);
        }
    }

    /// The next event in order; to be polled after every other call.
    #[must_use]
    pub(crate) fn poll(&mut self) -> Option<ExecProcessEvent> {
        if let ExitState::Late { .. } = self.exit
            && let ExitState::Late { seq, exit } =
                std::mem::replace(&mut self.exit, ExitState::Released)
        {
            return Some(ExecProcessEvent::Exited { seq, exit });
        }
        loop {
            let next = self.next();
            let entry = self
                .held
                .first_entry()
                .filter(|entry| *entry.key() == next)?;
            if matches!(entry.get(), ExecProcessEvent::Closed { .. })
                && matches!(self.exit, ExitState::Told(_))
                && let ExitState::Told(exit) =
                    std::mem::replace(&mut self.exit, ExitState::Released)
            {
                return Some(ExecProcessEvent::Exited {
                    seq: self.last,
                    exit,
                });
            }
            let event = entry.remove();
            self.held_bytes -= event.bytes();
            self.last = event.seq().unwrap_or(next);
            self.count(&event);
            match event {
                // A second exit takes up a number, but nobody wants to hear of it.
                ExecProcessEvent::Exited { .. } if matches!(self.exit, ExitState::Released) => {}
                ExecProcessEvent::Exited { .. } => {
                    self.exit = ExitState::Released;
                    return Some(event);
                }
                ExecProcessEvent::Closed { .. } => {
                    self.closed = true;
                    self.held.clear();
                    self.held_bytes = 0;
                    return Some(event);
                }
                event => return Some(event),
            }
        }
    }

    fn next(&self) -> u64 {
        self.last.saturating_add(1)
    }

    fn holds_exit(&self) -> bool {
        self.held
            .values()
            .any(|event| matches!(event, ExecProcessEvent::Exited { .. }))
    }

    fn hold(&mut self, seq: u64, event: ExecProcessEvent) {
        self.held.entry(seq).or_insert_with(|| {
            self.held_bytes += event.bytes();
            event
        });
    }

    fn hold_gap(&mut self, numbers: RangeInclusive<u64>, bytes: Option<u64>) {
        let gap = ExecProcessEvent::Gap {
            after_seq: numbers.start() - 1,
            through_seq: *numbers.end(),
            bytes,
        };
        self.hold(*numbers.start(), gap);
    }

    fn count(&mut self, event: &ExecProcessEvent) {
        match event {
            ExecProcessEvent::Gap { bytes: None, .. } => self.uncounted = true,
            ExecProcessEvent::Gap {
                bytes: Some(bytes), ..
            } => self.counted = self.counted.saturating_add(*bytes),
            event => self.counted += event.bytes() as u64,
        }
    }

    /// How many bytes after the released ones are gone, if that can be told.
    fn lost(&self, evicted: Evicted) -> Option<u64> {
        let behind = evicted.through_seq.saturating_sub(self.last);
        if self.last == 0 || behind <= EVICTED_SIZES {
            return Some(evicted.bytes);
        }
        // The server counts from the beginning.
        let counted = (!self.uncounted).then_some(self.counted)?;
        evicted.bytes.checked_sub(counted)
    }

    /// Gives up held output that lies among what the server has evicted: with it there would be
    /// several gaps, and nobody could tell the size of any. Nothing is done if an ending is among it.
    fn forget_output(&mut self, through: u64) -> bool {
        let is_output = |(_, event): (&u64, &ExecProcessEvent)| {
            matches!(event, ExecProcessEvent::Output { .. })
        };
        if !self.held.range(..=through).all(is_output) {
            return false;
        }
        let kept = self.held.split_off(&through.saturating_add(1));
        self.held = kept;
        self.held_bytes = self.held.values().map(ExecProcessEvent::bytes).sum();
        true
    }

    /// Bytes that the server has evicted, but we have.
    fn held_bytes_through(&self, seq: u64) -> u64 {
        self.held
            .range(..=seq)
            .map(|(_, event)| event.bytes() as u64)
            .sum()
    }

    /// Forgets the farthest output while too much is held; its numbers stay known, so that it is
    /// read again when its turn comes.
    fn trim(&mut self) {
        while self.held.len() > MAX_HELD_EVENTS || self.held_bytes > MAX_HELD_BYTES {
            let farthest = self.held.iter().rev().find_map(|(&seq, event)| {
                matches!(event, ExecProcessEvent::Output { .. }).then_some(seq)
            });
            let Some(event) = farthest.and_then(|seq| self.held.remove(&seq)) else {
                return;
            };
            self.held_bytes -= event.bytes();
        }
    }

    /// Runs of numbers after the released ones, up to `through`, that are not held.
    fn missing(&self, through: u64) -> Vec<RangeInclusive<u64>> {
        let mut missing = Vec::new();
        let mut next = self.next();
        for (&start, event) in &self.held {
            if start > through {
                break;
            }
            if next < start {
                missing.push(next..=start - 1);
            }
            next = event.seq().unwrap_or(start).saturating_add(1);
        }
        if next <= through && self.last < through {
            missing.push(next..=through);
        }
        missing
    }
}

/// How many runs begin with a number up to `through`.
fn runs_through(missing: &[RangeInclusive<u64>], through: u64) -> usize {
    missing
        .iter()
        .filter(|range| *range.start() <= through)
        .count()
}

fn end_of(missing: &[RangeInclusive<u64>]) -> Option<u64> {
    missing.last().map(|range| *range.end())
}

fn drop_last(missing: &mut Vec<RangeInclusive<u64>>) {
    if let Some(range) = missing.pop() {
        let (start, end) = range.into_inner();
        if start < end {
            missing.push(start..=end - 1);
        }
    }
}

#[cfg(test)]
mod tests;
