//! Input queue of one process: data that was accepted and that the child has not read yet.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::{Buf as _, Bytes};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

/// 256 KiB: maximum queued input of a child that does not read; beyond it, writers wait.
pub(crate) const QUEUE_BYTES: usize = 256 * 1024;

/// Writes of at least this size do not wake the child individually.
const TOGETHER_BYTES: usize = 32 * 1024;

/// The write end of a child's input, and the queue.
#[derive(Debug)]
pub(crate) struct StdinQueue {
    /// `None` once closed or broken, or if there never was an input.
    file: Option<Arc<AsyncFd<OwnedFd>>>,
    /// Whether it is a terminal, which stays open for reading after its input has failed.
    terminal: bool,
    queue: VecDeque<Bytes>,
    queued: usize,
    /// Close the input when the queue is empty.
    closing: bool,
    /// Whether the pipe capacity was raised already.
    enlarged: bool,
}

/// Result of an attempt to write.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PushResult {
    /// Written or queued.
    Accepted,
    /// The queue is full; contains the data.
    Full(Bytes),
    /// The input is closed.
    Closed,
}

impl StdinQueue {
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

    /// Writes what fits without blocking and queues the rest, if the queue has space.
    pub(crate) fn push(&mut self, data: Bytes) -> PushResult {
        if self.file.is_none() || self.closing {
            return PushResult::Closed;
        }
        if self.queued >= QUEUE_BYTES {
            return PushResult::Full(data);
        }
        if data.is_empty() {
            return PushResult::Accepted;
        }
        // Each write wakes a child that waits for it, which may cost more than the copy. Large data
        // is left to the supervisor, which writes everything that has arrived by its next turn in
        // one call.
        let together = data.len() >= TOGETHER_BYTES && !self.is_broken();
        self.queued += data.len();
        self.queue.push_back(data);
        if self.queue.len() == 1 && !together {
            self.drain();
        }
        if self.file.is_none() {
            PushResult::Closed
        } else {
            PushResult::Accepted
        }
    }

    /// Ends the input after the queued data; false if it has already ended.
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

    /// Closes the input and discards the queue.
    pub(crate) fn close(&mut self) {
        self.file = None;
        self.queue = VecDeque::new();
        self.queued = 0;
    }

    /// The file to poll for writability, if data is queued.
    pub(crate) fn waiting(&self) -> Option<&Arc<AsyncFd<OwnedFd>>> {
        self.file.as_ref().filter(|_| !self.queue.is_empty())
    }

    /// Writes until the queue is empty or the pipe is full; true if the pipe is full.
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
                    // The child closed its end or has ended; a terminal has lost its last reader.
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

    /// Removes written data from the queue.
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

    /// Whether no process has the read end open, so that a write would fail.
    fn is_broken(&self) -> bool {
        let Some(file) = &self.file else { return true };
        let mut poll_fds = [PollFd::new(file.get_ref(), PollFlags::OUT)];
        rustix::event::poll(&mut poll_fds, Some(&Timespec::default())).is_err()
            || poll_fds[0]
                .revents()
                .intersects(PollFlags::ERR | PollFlags::HUP)
    }

    /// Raises the pipe capacity of a child that cannot keep up, so that each of its reads returns
    /// more.
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
