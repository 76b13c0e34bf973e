//! The input of one process: what was accepted and has not been taken yet.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::{Buf as _, Bytes};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

/// Bytes that wait for a child that does not read; beyond it, writers wait.
pub(crate) const QUEUE_BYTES: usize = 256 * 1024;

/// A write of this size is not worth waking the child for by itself.
const TOGETHER_BYTES: usize = 32 * 1024;

/// The writing end of a child's input, and what waits for it.
#[derive(Debug)]
pub(crate) struct Stdin {
    /// Absent once closed, broken, or from the beginning.
    file: Option<Arc<AsyncFd<OwnedFd>>>,
    /// A terminal stays open for reading after its input has failed.
    terminal: bool,
    queue: VecDeque<Bytes>,
    queued: usize,
    /// Close when the queue is empty.
    closing: bool,
    /// Whether the pipe was given more room already.
    enlarged: bool,
}

/// What became of an attempt to write.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Push {
    /// Written or queued.
    Accepted,
    /// The queue is full; here is the data back.
    Full(Bytes),
    /// There is nothing to write to.
    Closed,
}

impl Stdin {
    pub(crate) fn new(file: Option<Arc<AsyncFd<OwnedFd>>>, terminal: bool) -> Self {
        let queue = VecDeque::new();
        Self {
            file,
            terminal,
            queue,
            queued: 0,
            closing: false,
            enlarged: false,
        }
    }

    /// Writes at once what fits and queues the rest, if the queue has room.
    pub(crate) fn push(&mut self, data: Bytes) -> Push {
        if self.file.is_none() || self.closing {
            return Push::Closed;
        }
        if self.queued >= QUEUE_BYTES {
            return Push::Full(data);
        }
        if data.is_empty() {
            return Push::Accepted;
        }
        // Each write wakes a child that waits for it, which may cost more than the copy: much data is
        // left to the supervisor, which writes at once what has come by the time of its turn.
        let together = data.len() >= TOGETHER_BYTES && !self.is_broken();
        self.queued += data.len();
        self.queue.push_back(data);
        if self.queue.len() == 1 && !together {
            self.drain();
        }
        if self.file.is_none() {
            Push::Closed
        } else {
            Push::Accepted
        }
    }

    /// Ends the input after what is queued; false if it has ended already.
    pub(crate) fn finish(&mut self) -> bool {
        if self.file.is_none() || self.closing {
            return false;
        }
        self.closing = true;
        if self.queue.is_empty() {
            self.close();
        }
        true
    }

    /// Gives up the input and what waits for it.
    pub(crate) fn close(&mut self) {
        self.file = None;
        self.queue = VecDeque::new();
        self.queued = 0;
    }

    /// The file to wait for, if something waits to be written.
    pub(crate) fn waiting(&self) -> Option<&Arc<AsyncFd<OwnedFd>>> {
        self.file.as_ref().filter(|_| !self.queue.is_empty())
    }

    /// Writes what the child takes; true when it takes no more for now.
    pub(crate) fn drain(&mut self) -> bool {
        let Some(file) = self.file.clone() else {
            return false;
        };
        while !self.queue.is_empty() {
            match self.write(file.get_ref()) {
                Ok(written) => self.advance(written),
                Err(Errno::AGAIN) => {
                    self.enlarge(file.get_ref());
                    return true;
                }
                Err(Errno::INTR) => {}
                Err(_) => {
                    // The child closed its end or is gone; a terminal has lost its last reader.
                    self.close();
                    return false;
                }
            }
        }
        if self.closing {
            self.close();
        }
        false
    }

    fn write(&self, file: &OwnedFd) -> rustix::io::Result<usize> {
        let mut parts = [IoSlice::new(&[]); 8];
        for (part, data) in parts.iter_mut().zip(&self.queue) {
            *part = IoSlice::new(data);
        }
        rustix::io::writev(file, &parts[..self.queue.len().min(parts.len())])
    }

    /// Takes off the queue what was written.
    fn advance(&mut self, mut written: usize) {
        self.queued -= written;
        while let Some(front) = self.queue.front_mut() {
            let part = written.min(front.len());
            front.advance(part);
            written -= part;
            if !front.is_empty() {
                return;
            }
            self.queue.pop_front();
        }
    }

    /// Whether nobody has the other end any more, so that a write would fail.
    fn is_broken(&self) -> bool {
        let Some(file) = &self.file else { return true };
        let mut asked = [PollFd::new(file.get_ref(), PollFlags::OUT)];
        rustix::event::poll(&mut asked, Some(&Timespec::default())).is_err()
            || asked[0]
                .revents()
                .intersects(PollFlags::ERR | PollFlags::HUP)
    }

    /// A child that cannot keep up gets a larger pipe, so that each of its reads brings more.
    fn enlarge(&mut self, file: &OwnedFd) {
        if !self.terminal && !self.enlarged {
            self.enlarged = true;
            let _ = rustix::pipe::fcntl_setpipe_size(file, super::LARGE_PIPE_BYTES);
        }
    }

    pub(crate) fn has_room(&self) -> bool {
        self.queued < QUEUE_BYTES || self.file.is_none()
    }
}
