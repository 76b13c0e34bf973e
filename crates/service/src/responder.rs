//! Response of one request: its encoding, the memory for it, and its records in metrics and traces.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use exec_server_protocol::envelope;
use exec_server_protocol::limits::MAX_MESSAGE_BYTES;
use exec_server_protocol::{ErrorObject, RequestId};
use exec_server_sys::memory;
use serde::Serialize;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use crate::ApiError;
use crate::backlog::{self, InputBacklog};
use crate::budget::BudgetShare;
use crate::counters::MethodIndex;
use crate::files::FileLane;
use crate::outbox::{OutMessage, Outbox};
use crate::pieces::{self, PIECE_COST, PieceSource, PiecewiseResponse};
use crate::trace::{TraceContext, Tracer};

/// Bytes of a response in addition to its result.
const ENVELOPE_BYTES: usize = 256;

/// Sends the response of one request to its client.
#[derive(Debug)]
pub(crate) struct RequestResponder {
    pub(crate) id: RequestId,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) backlog: Arc<InputBacklog>,
    /// Whether each request is finished before the next one is read.
    pub(crate) serial: bool,
    /// The permit to be processed, from `Connection::slots`.
    pub(crate) slot: Option<OwnedSemaphorePermit>,
    /// Memory for the response, from the budget of the server.
    pub(crate) reserved: Option<BudgetShare>,
    /// The stdin data of this request, counted in the backlog.
    pub(crate) unwritten: Option<backlog::WaitingWrite>,
    /// The method of the request; `since` is when it arrived.
    pub(crate) method: MethodIndex,
    pub(crate) since: Instant,
    /// The exporter for traces and the trace context of the request.
    pub(crate) trace: Option<Box<(Tracer, TraceContext)>>,
    /// The response is an error.
    pub(crate) failed: bool,
}

impl RequestResponder {
    /// Sends a result or an error.
    pub(crate) fn send<R: Serialize>(self, result: Result<R, ApiError>) {
        match result {
            Ok(result) => {
                self.send_with(|out, id| envelope::encode_response(out, id, &result));
            }
            Err(error) => self.send_error(error),
        }
    }

    /// Sends an error.
    pub(crate) fn send_error(mut self, error: ApiError) {
        self.failed = true;
        if error.is_refusal {
            self.outbox.metrics.sandbox_refusals.add(1);
        }
        let error = ErrorObject::from(error);
        let mut message = Vec::with_capacity(128);
        let encoded = envelope::encode_error(&mut message, &self.id, &error);
        debug_assert!(encoded.is_ok(), "an error with a text always serialises");
        self.send_message(message);
    }

    /// Sends a message that `encode` writes; if it exceeds the size limit or there is no memory for
    /// it, sends an error instead.
    fn send_with(
        self,
        encode: impl FnOnce(FallibleWriter<'_>, &RequestId) -> serde_json::Result<()>,
    ) {
        let mut message = Vec::with_capacity(128);
        match encode(FallibleWriter(&mut message), &self.id) {
            Ok(()) => self.send_message(message),
            Err(error) => {
                drop(message);
                let message = format!("cannot encode the answer: {error}");
                self.send_error(ApiError::internal(message));
            }
        }
    }

    fn send_message(mut self, mut message: Vec<u8>) {
        if message.len() > MAX_MESSAGE_BYTES {
            self.failed = true;
            let error = too_large(message.len()).into();
            message = Vec::new();
            let encoded = envelope::encode_error(&mut message, &self.id, &error);
            debug_assert!(encoded.is_ok(), "an error with a text always serialises");
        }
        self.count();
        let mut reserved = self.reserved.take();
        if let Some(reserved) = &mut reserved {
            reserved.shrink(message.len());
        }
        self.outbox.push(OutMessage {
            message,
            _reserved: reserved,
        });
    }

    /// Records the response in metrics and traces.
    fn count(&mut self) {
        let took = self.since.elapsed();
        self.outbox
            .metrics
            .record_response(self.method, took, self.failed);
        if let Some(trace) = self.trace.take() {
            let (tracer, context) = *trace;
            tracer.record(context, self.method.name(), took, self.failed);
        }
    }

    /// Sends a response whose result `source` produces while the peer receives it. Runs on a file
    /// thread.
    ///
    /// If the first piece cannot be produced, sends an error.
    pub(crate) fn send_in_pieces(
        mut self,
        lane: (&Arc<FileLane>, &CancellationToken),
        mut source: Box<dyn PieceSource>,
    ) {
        let reserved_head = pieces::reserved(PIECE_COST).and_then(|mut head| {
            self.begin_result(&mut head);
            let is_complete = source.next(&mut head)?;
            Ok((head, is_complete))
        });
        let head = match reserved_head {
            Ok((mut message, true)) => {
                message.extend_from_slice(pieces::END);
                return self.send_message(message);
            }
            Ok((head, false)) => head,
            Err(error) => return self.send_error(error),
        };
        self.count();
        let pieces = PiecewiseResponse::new(lane, &self.outbox, head, source, self.reserved.take());
        self.outbox.push_pieces(pieces);
    }

    fn begin_result(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"id\":");
        let encoded = serde_json::to_writer(&mut *out, &self.id);
        debug_assert!(encoded.is_ok(), "an id always serialises");
        out.extend_from_slice(b",\"result\":");
    }

    /// Sends a result of about `hint` bytes that `write` appends as JSON.
    pub(crate) fn send_result(self, hint: usize, write: impl FnOnce(&mut Vec<u8>)) {
        self.try_send_result(hint, |out| {
            write(out);
            Ok(())
        });
    }

    /// Like [`RequestResponder::send_result`]; if `write` fails, sends its error. Returns whether it
    /// succeeded.
    pub(crate) fn try_send_result(
        self,
        hint: usize,
        write: impl FnOnce(&mut Vec<u8>) -> Result<(), ApiError>,
    ) -> bool {
        let Some(mut message) = memory::buffer(hint + ENVELOPE_BYTES) else {
            self.send_error(pieces::no_memory(hint));
            return false;
        };
        self.begin_result(&mut message);
        match write(&mut message) {
            Ok(()) => {
                message.push(b'}');
                self.send_message(message);
                true
            }
            Err(error) => {
                self.send_error(error);
                false
            }
        }
    }

    /// Counts the bytes of a request that waits for a disk; above a limit no further request is
    /// read.
    pub(crate) fn hold(&mut self, bytes: usize) {
        self.unwritten = Some(self.backlog.add(bytes));
    }

    /// Reserves memory for a response of about `bytes`, if it is available now.
    pub(crate) fn try_reserve(&mut self, bytes: usize) -> bool {
        if self.reserved.is_none() {
            self.reserved = self.outbox.try_reserve(bytes);
        }
        self.reserved.is_some()
    }

    /// Reserves `bytes` in addition to those already reserved, if they are available now.
    pub(crate) fn try_reserve_more(&mut self, bytes: usize) -> bool {
        let Some(more) = self.outbox.try_reserve(bytes) else {
            return false;
        };
        match &mut self.reserved {
            Some(reserved) => reserved.merge(more),
            None => self.reserved = Some(more),
        }
        true
    }

    /// Returns all but `bytes` of the reserved memory.
    pub(crate) fn shrink_memory(&mut self, bytes: usize) {
        if let Some(reserved) = &mut self.reserved {
            reserved.shrink(bytes);
        }
    }

    /// Returns the reserved memory.
    pub(crate) fn release_memory(&mut self) {
        self.reserved = None;
    }

    /// Counts a write by its bytes instead of as a processed request: until the child reads the
    /// data, the write does not delay other requests.
    pub(crate) fn wait_for_input(&mut self, bytes: usize) {
        self.unwritten = Some(self.backlog.add(bytes));
        if !self.serial {
            self.slot = None;
        }
    }

    /// Waits for memory for a response of about `bytes`.
    pub(crate) async fn reserve(&mut self, bytes: usize) {
        self.reserved = Some(self.outbox.reserve(bytes).await);
    }
}

/// Writer to a buffer whose growth may fail, so that a response for which there is no memory ends
/// its request and not the server.
struct FallibleWriter<'a>(&'a mut Vec<u8>);

impl io::Write for FallibleWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        pieces::grow(self.0, bytes.len()).map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn too_large(bytes: usize) -> ApiError {
    ApiError::invalid_request(format!(
        "answer of {bytes} bytes exceeds the limit of {MAX_MESSAGE_BYTES} bytes per message; \
         read it in parts"
    ))
}
