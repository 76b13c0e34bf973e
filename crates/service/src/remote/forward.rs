//! Forwarding of relay streams to an existing server, which need not support remote mode.
//!
//! Owns the path between a stream and its destination. Passes messages on without interpreting
//! their content.

use std::collections::BTreeMap;
use std::io;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use exec_server_registry::relay::RelayStream;
use exec_server_transport::frame::close_code;
use exec_server_transport::keepalive::{Keepalive, KeepaliveAction, KeepaliveConfig};
use exec_server_transport::{
    ConnectError, ConnectOptions, Link, LinkError, LinkReceiver, LinkSender, RawEvent, connect,
    stdio,
};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::{RemoteEnvironmentConfig, RemoteEnvironmentError, RemoteStatus, serve_streams};

/// How long a command may take to exit after its stream has ended.
const COMMAND_GRACE: Duration = Duration::from_secs(5);

/// An existing server that streams are forwarded to.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ForwardDestination {
    /// The server at a URL: `ws://`, `wss://` or `unix://`.
    Url {
        /// The URL.
        url: String,
        /// Connection options, including credentials.
        options: ConnectOptions,
    },
    /// A command that serves its standard input and output; one is started for each stream.
    Command {
        /// The command and its arguments.
        argv: Vec<String>,
        /// The complete environment of the command.
        environment: BTreeMap<String, String>,
    },
}

/// Why a destination cannot be reached.
#[derive(Debug, thiserror::Error)]
enum ForwardDestinationError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("cannot start `{program}`: {source}")]
    Command { program: String, source: io::Error },
}

impl ForwardDestination {
    async fn open(&self) -> Result<(Link, Option<Child>), ForwardDestinationError> {
        match self {
            Self::Url { url, options } => Ok((connect(url, options).await?, None)),
            Self::Command { argv, environment } => {
                let (program, arguments) = argv
                    .split_first()
                    .map_or(("", &[][..]), |(program, rest)| (program.as_str(), rest));
                let mut command = Command::new(program);
                command
                    .args(arguments)
                    .env_clear()
                    .envs(environment)
                    .stderr(Stdio::inherit());
                let (link, child) =
                    stdio::spawn(command).map_err(|source| ForwardDestinationError::Command {
                        program: program.to_owned(),
                        source,
                    })?;
                Ok((link, Some(child)))
            }
        }
    }
}

/// Registers an existing server as an environment, and forwards its streams until registering fails
/// permanently.
///
/// Each stream has its own connection to the destination. When the destination closes the
/// connection, the stream ends after all its messages have been sent; when the stream ends, the
/// connection ends. When `stop` is cancelled, all connections end.
///
/// # Errors
///
/// Same as [`run_remote_environment`](super::run_remote_environment).
pub async fn forward(
    config: RemoteEnvironmentConfig,
    destination: ForwardDestination,
    status: watch::Sender<RemoteStatus>,
    stop: CancellationToken,
) -> Result<(), RemoteEnvironmentError> {
    let destination = Arc::new(destination);
    let stopped = stop.clone();
    serve_streams(config, status, stop, move |stream: RelayStream| {
        let destination = Arc::clone(&destination);
        let stopped = stopped.clone();
        async move {
            let id = Arc::clone(&stream.stream_id);
            match destination.open().await {
                Ok((link, child)) => {
                    tokio::select! {
                        outcome = splice(stream.link, link) => if let Err(error) = outcome {
                            tracing::debug!(stream = &*id, %error, "a forwarded stream ended with an error");
                        },
                        () = stopped.cancelled() => {}
                    }
                    if let Some(mut child) = child {
                        // The standard input of the command is closed. If the command does not exit
                        // in time, dropping the handle kills it.
                        let _ = tokio::time::timeout(COMMAND_GRACE, child.wait()).await;
                    }
                }
                Err(error) => {
                    tracing::error!(stream = &*id, %error, "cannot connect to the destination");
                }
            }
        }
    })
    .await
}

/// Forwards messages in both directions until one side ends.
async fn splice(stream: Link, destination: Link) -> Result<(), LinkError> {
    // Pings of the destination; while one has not been answered, further ones are dropped.
    let (ping, pings) = mpsc::channel(1);
    let received_frame = AtomicBool::new(false);
    let pinging = destination.has_pings();
    let there = ToDestination {
        outgoing: destination.outgoing,
        text: pinging,
        keepalive: pinging.then(|| Keepalive::new(KeepaliveConfig::default(), Instant::now())),
        pings,
        received_frame: &received_frame,
    };
    tokio::select! {
        result = there.forward_to_destination(stream.incoming) => result,
        result = forward_back(destination.incoming, stream.outgoing, &ping, &received_frame) => result,
    }
}

/// The direction from a stream to its destination.
struct ToDestination<'a> {
    outgoing: LinkSender,
    /// Whether messages are websocket messages; otherwise they are lines.
    text: bool,
    keepalive: Option<Keepalive>,
    pings: mpsc::Receiver<Vec<u8>>,
    /// Whether the destination has sent something since the last check.
    received_frame: &'a AtomicBool,
}

impl ToDestination<'_> {
    async fn forward_to_destination(mut self, mut incoming: LinkReceiver) -> Result<(), LinkError> {
        loop {
            let wake = match self.keep_alive()? {
                Some(wake) => wake,
                None => Instant::now() + Duration::from_secs(3600),
            };
            tokio::select! {
                event = incoming.recv_raw() => match event? {
                    Some(RawEvent::Message { bytes, .. }) => {
                        if !self.text {
                            let line = without_line_ends(bytes);
                            self.outgoing.push_message(line.len(), |out| out.extend(line));
                        } else if std::str::from_utf8(bytes).is_ok() {
                            self.outgoing.push_message(bytes.len(), |out| out.extend_from_slice(bytes));
                        } else {
                            self.outgoing.push_binary([bytes, &[]]);
                        }
                    }
                    Some(_) => {}
                    None => {
                        self.outgoing.push_close(close_code::NORMAL, "");
                        return Ok(self.outgoing.shutdown().await?);
                    }
                },
                Some(payload) = self.pings.recv() => self.outgoing.push_pong(&payload),
                () = tokio::time::sleep_until(wake.into()) => {}
            }
            if self.outgoing.buffered() > 0 {
                self.outgoing.flush().await?;
            } else {
                self.outgoing.relax();
            }
        }
    }

    /// Sends a ping if one is due; returns when to check again.
    fn keep_alive(&mut self) -> Result<Option<Instant>, LinkError> {
        let Some(keepalive) = &mut self.keepalive else {
            return Ok(None);
        };
        let now = Instant::now();
        if self.received_frame.swap(false, Ordering::Relaxed) {
            keepalive.record_received_data(now);
        }
        match keepalive.poll(now) {
            KeepaliveAction::Wait(until) => Ok(Some(until)),
            KeepaliveAction::Ping => {
                self.outgoing.push_ping();
                Ok(Some(now))
            }
            KeepaliveAction::GiveUp => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        }
    }
}

/// Converts a message to one line. Line ends in JSON are whitespace, because strings contain them
/// only in escaped form.
fn without_line_ends(message: &[u8]) -> Vec<u8> {
    let space = |byte: &u8| match byte {
        b'\n' | b'\r' => b' ',
        byte => *byte,
    };
    message.iter().map(space).collect()
}

async fn forward_back(
    mut incoming: LinkReceiver,
    mut outgoing: LinkSender,
    ping: &mpsc::Sender<Vec<u8>>,
    received_frame: &AtomicBool,
) -> Result<(), LinkError> {
    while let Some(event) = incoming.recv_raw().await? {
        received_frame.store(true, Ordering::Relaxed);
        match event {
            RawEvent::Message { bytes, .. } => {
                outgoing.push_message(bytes.len(), |out| out.extend_from_slice(bytes));
                outgoing.flush().await?;
            }
            RawEvent::Ping(payload) => {
                let _ = ping.try_send(payload.to_vec());
            }
            RawEvent::Pong => {}
        }
        outgoing.relax();
    }
    outgoing.shutdown().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::task::{Context, Poll};

    use bytes::Bytes;
    use exec_server_transport::link::{MessageSink, MessageSource};

    use super::*;

    async fn send_bytes(link: &mut LinkSender, text: &[u8]) {
        link.push_message(text.len(), |out| out.extend_from_slice(text));
        link.flush().await.unwrap();
    }

    async fn receive_bytes(link: &mut LinkReceiver) -> Option<Vec<u8>> {
        match link.recv_raw().await.unwrap()? {
            RawEvent::Message { bytes, .. } => Some(bytes.to_vec()),
            other => panic!("{other:?}"),
        }
    }

    struct FromChannel(mpsc::UnboundedReceiver<Bytes>);

    impl MessageSource for FromChannel {
        fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
            self.0.poll_recv(cx)
        }
    }

    struct ToChannel(mpsc::UnboundedSender<Bytes>);

    impl MessageSink for ToChannel {
        fn poll_send(
            &mut self,
            _: &mut Context<'_>,
            messages: &mut VecDeque<Bytes>,
        ) -> Poll<io::Result<()>> {
            while let Some(message) = messages.pop_front() {
                if self.0.send(message).is_err() {
                    return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
                }
            }
            Poll::Ready(Ok(()))
        }
    }

    /// Creates two connected links with the properties of relay streams: whole messages, no pings.
    fn streams() -> (Link, Link) {
        let (to_there, from_here) = mpsc::unbounded_channel();
        let (to_here, from_there) = mpsc::unbounded_channel();
        (
            Link::handed(FromChannel(from_there), ToChannel(to_there)),
            Link::handed(FromChannel(from_here), ToChannel(to_here)),
        )
    }

    #[tokio::test]
    async fn splice_forwards_messages_and_delivers_pending_ones_after_destination_ends() {
        let (mut harness, stream) = streams();
        let (destination, mut server) = Link::pair();
        let splicing = tokio::spawn(splice(stream, destination));
        // Over a pipe, pretty-printed JSON must be one line.
        send_bytes(&mut harness.outgoing, b"{\n \"id\": 1\r\n}").await;
        assert_eq!(
            receive_bytes(&mut server.incoming).await.unwrap(),
            b"{  \"id\": 1  }"
        );
        for n in 0..100 {
            send_bytes(&mut server.outgoing, format!("{{\"n\":{n}}}").as_bytes()).await;
        }
        drop(server);
        for n in 0..100 {
            let expected = format!("{{\"n\":{n}}}");
            assert_eq!(
                receive_bytes(&mut harness.incoming).await.unwrap(),
                expected.as_bytes()
            );
        }
        assert_eq!(receive_bytes(&mut harness.incoming).await, None);
        splicing.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn splice_answers_pings_of_the_destination() {
        use exec_server_transport::frame::WebsocketRole;
        let (harness, stream) = streams();
        let (client, server) = tokio::io::duplex(1 << 16);
        let [client, mut server] = [
            (client, WebsocketRole::Client),
            (server, WebsocketRole::Server),
        ]
        .map(|(end, role)| {
            let (reader, writer) = tokio::io::split(end);
            Link::websocket(role, reader, writer, Vec::new())
        });
        let splicing = tokio::spawn(splice(stream, client));
        server.outgoing.push_ping();
        server.outgoing.flush().await.unwrap();
        let event = server.incoming.recv_raw().await.unwrap();
        assert!(matches!(event, Some(RawEvent::Pong)), "{event:?}");
        drop(harness);
        // The destination is notified of the end of the stream.
        assert!(server.incoming.recv_raw().await.unwrap().is_none());
        splicing.await.unwrap().unwrap();
    }
}
