//! Export of request traces to an OpenTelemetry collector (OTLP over HTTP, as JSON).
//!
//! Owns the choice of traced requests, the bounded queue of spans and the task that sends them. A
//! request has a span only if its client traces it and sets `trace`: the client decides which
//! requests are worth a trace, and all others have no cost.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use exec_server_protocol::envelope::TraceParent;
use exec_server_transport::http::{self, HeadKind};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

/// Spans in the queue, about 200 bytes each.
const QUEUE: usize = 8192;
/// Spans in one message.
const BATCH: usize = 512;
/// How long spans are collected before they are sent.
const PERIOD: Duration = Duration::from_secs(1);
/// Timeout of one message to the collector.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Exporter of spans to a collector; cheap to clone.
#[derive(Debug, Clone)]
pub struct Tracer {
    spans: mpsc::Sender<Span>,
    lost: Arc<AtomicU64>,
}

/// Trace context of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TraceContext {
    trace_id: u128,
    parent: u64,
}

#[derive(Debug)]
struct Span {
    context: TraceContext,
    name: &'static str,
    end: SystemTime,
    took: Duration,
    failed: bool,
}

/// The error for an invalid collector endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot send traces to `{0}`; expected http://HOST:PORT, as of a collector on this machine"
)]
pub struct EndpointError(String);

impl Tracer {
    /// Starts an exporter to the collector at `http://HOST:PORT[/PATH]` under this service name.
    /// Requires a tokio runtime; the task that sends spans ends when the last clone is dropped.
    ///
    /// # Errors
    ///
    /// When the endpoint is not such a URL.
    pub fn start(endpoint: &str, service: &str) -> Result<Self, EndpointError> {
        let invalid = || EndpointError(endpoint.to_owned());
        let rest = endpoint.strip_prefix("http://").ok_or_else(invalid)?;
        let (address, path) = match rest.split_once('/') {
            Some((address, path)) if !path.is_empty() => (address, format!("/{path}")),
            Some((address, _)) => (address, "/v1/traces".to_owned()),
            None => (rest, "/v1/traces".to_owned()),
        };
        let port = address
            .rsplit_once(':')
            .and_then(|(_, port)| port.parse::<u16>().ok());
        if port.is_none() || !endpoint.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(invalid());
        }
        let (spans, queue) = mpsc::channel(QUEUE);
        let lost = Arc::new(AtomicU64::new(0));
        let sender = SpanSender {
            address: address.to_owned(),
            path,
            service: service.to_owned(),
            lost: Arc::clone(&lost),
        };
        tokio::spawn(sender.run(queue));
        Ok(Self { spans, lost })
    }

    /// Queues the span of a completed request.
    pub(crate) fn record(
        &self,
        context: TraceContext,
        name: &'static str,
        took: Duration,
        failed: bool,
    ) {
        let end = SystemTime::now();
        let span = Span {
            context,
            name,
            end,
            took,
            failed,
        };
        if self.spans.try_send(span).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl TraceContext {
    /// Parses the context of a request; `None` if its client does not record it or the header is
    /// invalid.
    pub(crate) fn of(trace: Option<&TraceParent>) -> Option<Self> {
        let header = trace?.traceparent.as_deref()?;
        let parts: Vec<&str> = header.split('-').collect();
        // Later versions of the header may have more parts, but begin with these four.
        let [version, trace_id, parent, flags, ref more @ ..] = parts[..] else {
            return None;
        };
        let hex = |text: &str, digits: usize| {
            let lower = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            let fits = text.len() == digits && text.bytes().all(lower);
            fits.then(|| u128::from_str_radix(text, 16).ok()).flatten()
        };
        let version = hex(version, 2)?;
        if version == 0xff || (version == 0 && !more.is_empty()) {
            return None;
        }
        let trace_id = hex(trace_id, 32).filter(|id| *id != 0)?;
        let parent = hex(parent, 16).filter(|id| *id != 0)?;
        let sampled = hex(flags, 2)? & 1 == 1;
        sampled.then_some(Self {
            trace_id,
            parent: u64::try_from(parent).ok()?,
        })
    }
}

/// The task that sends spans.
struct SpanSender {
    address: String,
    path: String,
    service: String,
    lost: Arc<AtomicU64>,
}

impl SpanSender {
    async fn run(self, mut queue: mpsc::Receiver<Span>) {
        let mut batch = Vec::new();
        let mut complained = false;
        while queue.recv_many(&mut batch, BATCH).await > 0 {
            if batch.len() < BATCH {
                tokio::time::sleep(PERIOD).await;
                while batch.len() < BATCH
                    && let Ok(span) = queue.try_recv()
                {
                    batch.push(span);
                }
            }
            let count = batch.len() as u64;
            let body = self.encode(&batch);
            batch.clear();
            let sent = match tokio::time::timeout(TIMEOUT, self.send(body.as_bytes())).await {
                Ok(sent) => sent,
                Err(_) => Err(io::ErrorKind::TimedOut.into()),
            };
            match sent {
                Ok(()) => complained = false,
                Err(error) => {
                    let lost = self.lost.fetch_add(count, Ordering::Relaxed) + count;
                    if !complained {
                        let collector = &self.address;
                        tracing::warn!(%error, collector, lost, "cannot send traces");
                    }
                    complained = true;
                }
            }
        }
    }

    async fn send(&self, body: &[u8]) -> io::Result<()> {
        let mut stream = TcpStream::connect(&self.address).await?;
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n",
            self.path,
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body).await?;
        let answer = http::read_head(&mut stream, HeadKind::Response).await?;
        match answer.status {
            200..300 => Ok(()),
            status => Err(io::Error::other(format!("the collector answered {status}"))),
        }
    }

    fn encode(&self, batch: &[Span]) -> String {
        let text = |key: &str, value: &str| json!({"key": key, "value": {"stringValue": value}});
        let spans: Vec<Value> = batch
            .iter()
            .map(|span| {
                let end = span.end.duration_since(UNIX_EPOCH).unwrap_or_default();
                let start = end.saturating_sub(span.took);
                let (_, id) = uuid::Uuid::new_v4().as_u64_pair();
                json!({
                    "traceId": format!("{:032x}", span.context.trace_id),
                    "spanId": format!("{:016x}", id | 1),
                    "parentSpanId": format!("{:016x}", span.context.parent),
                    "name": span.name,
                    // Kind 2 is `SPAN_KIND_SERVER`.
                    "kind": 2,
                    "startTimeUnixNano": start.as_nanos().to_string(),
                    "endTimeUnixNano": end.as_nanos().to_string(),
                    "attributes": [text("rpc.system", "jsonrpc"), text("rpc.method", span.name)],
                    "status": {"code": if span.failed { 2 } else { 0 }},
                })
            })
            .collect();
        json!({"resourceSpans": [{
            "resource": {"attributes": [text("service.name", &self.service)]},
            "scopeSpans": [{
                "scope": {"name": "exec-server", "version": env!("CARGO_PKG_VERSION")},
                "spans": spans,
            }],
        }]})
        .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(header: &str) -> Option<TraceContext> {
        TraceContext::of(Some(&TraceParent {
            traceparent: Some(header.to_owned()),
            tracestate: None,
        }))
    }

    #[test]
    fn context_is_parsed_as_w3c_trace_context() {
        let id = "0af7651916cd43dd8448eb211c80319c";
        let good = format!("00-{id}-b7ad6b7169203331-01");
        let found = context(&good).unwrap();
        assert_eq!(format!("{:032x}", found.trace_id), id);
        assert_eq!(found.parent, 0xb7ad_6b71_6920_3331);
        assert!(context(&format!("cc-{id}-b7ad6b7169203331-01-what-the-future-has")).is_some());
        for bad in [
            String::new(),
            format!("00-{id}-b7ad6b7169203331-00"),
            format!("00-{id}-b7ad6b7169203331"),
            format!("00-{id}-b7ad6b7169203331-01-more"),
            format!("ff-{id}-b7ad6b7169203331-01"),
            format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)),
            format!("00-{id}-0000000000000000-01"),
            good.to_uppercase(),
            format!("00-{id}-+7ad6b7169203331-01"),
            "é-é-é-é".to_owned(),
        ] {
            assert_eq!(context(&bad), None, "{bad}");
        }
        assert_eq!(TraceContext::of(None), None);
    }

    #[tokio::test]
    async fn start_rejects_invalid_endpoints() {
        for good in [
            "http://127.0.0.1:4318",
            "http://c:1/",
            "http://[::1]:4318/v1/traces",
        ] {
            assert!(Tracer::start(good, "x").is_ok(), "{good}");
        }
        for bad in [
            "",
            "https://c:4318",
            "http://c",
            "http://c:x",
            "http://c:1/\r\nX: y",
        ] {
            assert!(Tracer::start(bad, "x").is_err(), "{bad}");
        }
    }
}
