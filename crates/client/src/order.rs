//! Sequence ordering, de-duplication and gap detection of process events (no IO, no clock).
//!
//! `EventOrder` tracks which numbers were released and which events are held behind a missing one,
//! and uses `process/read` responses to replace missing events.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use exec_server_protocol::limits::EVICTED_SIZES;
use exec_server_protocol::process::{Evicted, ReadResult};

use crate::event::{ExecProcessEvent, ProcessExit};

/// Maximum number of events held behind a missing one; compatible clients use the same limit.
pub(crate) const MAX_HELD_EVENTS: usize = 256;

/// Maximum number of bytes held behind a missing event. A server retains at least this much, so
/// output dropped above the limit can be read again.
pub(crate) const MAX_HELD_BYTES: usize = 1 << 20;

/// Puts events in order, drops duplicates and detects missing ones.
///
/// ```text
///   accept, fill ──► held (by number) ──► poll: releases the next number if it is held
///                        │
///                        └─ the next number is missing: has_hole() ──► process/read ──► fill
/// ```
#[derive(Debug, Default)]
pub(crate) struct EventOrder {
    /// Every number up to this one was released.
    last: u64,
    /// Highest number known from any event or response.
    seen: u64,
    /// Events that arrived early or are about to be released, by their first number.
    held: BTreeMap<u64, ExecProcessEvent>,
    /// Bytes of output in `held`.
    held_bytes: usize,
    exit: ExitState,
    /// The log is closed and its last event released.
    closed: bool,
    /// Bytes of all output that was released or reported as a gap.
    counted: u64,
    /// Whether some output could not be counted: a gap of unknown size, or output before the start.
    uncounted: bool,
}

#[derive(Debug, Default)]
enum ExitState {
    /// No exit is known, or its event is held until its number is next.
    #[default]
    Ahead,
    /// Known only from a response, without its own number: it must be released before `Closed`.
    Told(ProcessExit),
    /// A gap has covered its number: to be released next.
    Late {
        seq: u64,
        exit: ProcessExit,
    },
    Released,
}

/// Rules for interpreting a response to `process/read`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadRules {
    /// `afterSeq` of the read.
    pub(crate) after: u64,
    /// Whether the server reports evicted output in `evicted`. If not, the read must not be limited
    /// by `maxBytes`: only a complete response distinguishes an exit from evicted output.
    pub(crate) states_evicted: bool,
    /// Create `Exited` and `Closed` from the response, instead of leaving their numbers to the
    /// notifications, which carry more details.
    pub(crate) make_endings: bool,
}

impl EventOrder {
    /// Creates an order that begins after a number; 0 for a new process.
    pub(crate) fn after(last: u64) -> Self {
        Self {
            last,
            seen: last,
            uncounted: last > 0,
            ..Self::default()
        }
    }

    /// Returns the number of the last event that was released.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Returns whether `Closed` was released: no further events follow.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Returns whether a later event is known while the next one has not arrived. Call
    /// [`EventOrder::poll`] first.
    pub(crate) fn has_hole(&self) -> bool {
        !self.closed && self.seen > self.last && !self.held.contains_key(&self.next())
    }

    /// Accepts an event; the caller then calls [`EventOrder::poll`] until it returns `None`.
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
        self.buffer_event(seq, event);
        if seq != self.next() {
            self.trim();
        }
    }

    /// Releases an event directly if it is the next one: the usual case, without access to held
    /// events. Returns the event if it cannot be released yet.
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

    /// Applies a response to `process/read`; the caller then calls [`EventOrder::poll`] until it returns
    /// `None`.
    ///
    /// Afterwards every number that the response covers can be released, as output, exit, close or
    /// gap, except for an exit and close that the rules leave to the notifications.
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
                self.buffer_event(chunk.seq, chunk.into());
            }
        }
        let mut missing = self.missing(through);
        if rules.make_endings {
            // `Closed` always has the last number. A response that was limited by `maxBytes` ends
            // with output, which is held by now.
            if read.closed && end_of(&missing) == Some(through) {
                let closed = ExecProcessEvent::Closed {
                    seq: through,
                    inherited_output: false,
                    discarded_bytes: 0,
                    descendants: Vec::new(),
                };
                self.buffer_event(through, closed);
                drop_last(&mut missing);
            }
            if let Some(exit) = exit
                && matches!(self.exit, ExitState::Ahead | ExitState::Told(_))
                && !self.holds_exit()
            {
                // Servers evict the oldest events first, so the last missing number belongs to the
                // exit.
                let gone = match evicted {
                    Some(evicted) if rules.states_evicted => evicted.through_seq,
                    _ => 0,
                };
                match end_of(&missing) {
                    Some(seq) if seq > gone => {
                        self.buffer_event(seq, ExecProcessEvent::Exited { seq, exit });
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
                self.buffer_gap(start..=end, lost.filter(|_| start <= gone));
            }
        }
    }

    /// Stops waiting for missing events: they become gaps between the held events.
    pub(crate) fn give_up(&mut self) {
        let Some(end) = self.held.last_key_value().map(|(&start, _)| start) else {
            return;
        };
        for range in self.missing(end) {
            self.buffer_gap(range, None);
        }
    }

    /// Returns the next event in order; to be called after every other call.
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
                // A second exit uses up a number, but is not delivered to the consumer.
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

    fn buffer_event(&mut self, seq: u64, event: ExecProcessEvent) {
        self.held.entry(seq).or_insert_with(|| {
            self.held_bytes += event.bytes();
            event
        });
    }

    fn buffer_gap(&mut self, numbers: RangeInclusive<u64>, bytes: Option<u64>) {
        let gap = ExecProcessEvent::Gap {
            after_seq: numbers.start() - 1,
            through_seq: *numbers.end(),
            bytes,
        };
        self.buffer_event(*numbers.start(), gap);
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

    /// Returns how many bytes after the released ones are lost, if this is known.
    fn lost(&self, evicted: Evicted) -> Option<u64> {
        let behind = evicted.through_seq.saturating_sub(self.last);
        if self.last == 0 || behind <= EVICTED_SIZES {
            return Some(evicted.bytes);
        }
        // The evicted bytes are counted from the start of the output, so bytes already reported are subtracted.
        let counted = (!self.uncounted).then_some(self.counted)?;
        evicted.bytes.checked_sub(counted)
    }

    /// Drops held output within the range that the server has evicted: keeping it would create
    /// several gaps of unknown size. Returns `false` and drops no events if an exit or close is in
    /// the range.
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

    /// Returns the number of held bytes that the server has evicted.
    fn held_bytes_through(&self, seq: u64) -> u64 {
        self.held
            .range(..=seq)
            .map(|(_, event)| event.bytes() as u64)
            .sum()
    }

    /// Drops the output with the highest numbers while the limits are exceeded. Its numbers stay
    /// recorded, so it is read again when they are next.
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

    /// Returns the runs of numbers after the released ones, up to `through`, that are not held.
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

/// Returns how many runs begin with a number up to `through`.
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
