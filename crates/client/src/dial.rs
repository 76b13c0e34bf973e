//! Connection factory: the [`Dial`] trait that opens a link to a server, and its implementation for
//! URLs.
//!
//! Decisions about when to dial are made in `recovery`.

use std::any::Any;
use std::fmt;

use exec_server_transport::{Link, connect};
use futures_util::future::BoxFuture;

pub use crate::error::DialError;
use crate::error::ExecServerError;
use crate::options::RemoteExecServerConnectArgs;

/// Factory of links to one server: a client dials once to connect and again whenever its link is
/// lost.
///
/// Every link must lead to the server that holds the session. A program that is started for one
/// link holds sessions only while it runs, so starting another instance cannot recover a session.
///
/// Functions that return a future of a [`DialledLink`] also implement this trait:
///
/// ```no_run
/// use exec_server_client::{DialledLink, ExecServerClient, ExecServerClientConnectOptions, ExecServerError};
/// use exec_server_transport::{ConnectOptions, connect};
///
/// # async fn example() -> Result<(), ExecServerError> {
/// let dial = || async {
///     let link = connect("unix:///run/exec-server.sock", &ConnectOptions::default()).await?;
///     Ok::<_, ExecServerError>(DialledLink::from(link))
/// };
/// let options = ExecServerClientConnectOptions::new("example");
/// let client = ExecServerClient::connect_with(dial, options).await?;
/// # Ok(())
/// # }
/// ```
pub trait Dial: Send + Sync + 'static {
    /// Opens a link. Dropping the future cancels the attempt; recovery does so when its time is
    /// used up.
    ///
    /// # Errors
    ///
    /// Transient failures are retried: network failures in [`ExecServerError::Connect`], and those
    /// in [`ExecServerError::Dial`] that are marked as transient. All others end the recovery.
    fn dial(&self) -> BoxFuture<'_, Result<DialledLink, ExecServerError>>;

    /// Like [`Dial::dial`], for an implementation that can send messages before it knows that the
    /// link is open, which saves a round trip. [`DialledLink`] reports whether it sent them; the
    /// default implementation sends nothing.
    ///
    /// # Errors
    ///
    /// Same as for [`Dial::dial`].
    fn dial_with_messages(
        &self,
        first: InitialMessages,
    ) -> BoxFuture<'_, Result<DialledLink, ExecServerError>> {
        drop(first);
        self.dial()
    }
}

/// Messages to send on a link that is not open yet.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct InitialMessages {
    /// The messages, in sending order.
    pub messages: Vec<Vec<u8>>,
    /// Whether the messages may be sent again on another link although the server may have received
    /// them on this one.
    pub repeatable: bool,
}

impl<F, R> Dial for F
where
    F: Fn() -> R + Send + Sync + 'static,
    R: Future<Output = Result<DialledLink, ExecServerError>> + Send + 'static,
{
    fn dial(&self) -> BoxFuture<'_, Result<DialledLink, ExecServerError>> {
        Box::pin(self())
    }
}

/// Open link, together with a value that must live as long as the link.
pub struct DialledLink {
    pub(crate) link: Link,
    pub(crate) keep: Option<Box<dyn Any + Send + Sync>>,
    /// Whether the first messages were sent.
    pub(crate) first_messages_sent: bool,
}

impl DialledLink {
    /// Creates a link that needs `keep`, such as the process behind it; `keep` is dropped after the
    /// link.
    pub fn with(link: Link, keep: impl Any + Send + Sync) -> Self {
        Self {
            link,
            keep: Some(Box::new(keep)),
            first_messages_sent: false,
        }
    }
}

impl From<Link> for DialledLink {
    fn from(link: Link) -> Self {
        Self {
            link,
            keep: None,
            first_messages_sent: false,
        }
    }
}

impl fmt::Debug for DialledLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DialledLink")
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}

/// Dials a URL.
pub(crate) struct UrlDial(pub(crate) RemoteExecServerConnectArgs);

impl Dial for UrlDial {
    fn dial(&self) -> BoxFuture<'_, Result<DialledLink, ExecServerError>> {
        Box::pin(async {
            let link = connect(&self.0.url, &self.0.dial()).await?;
            Ok(DialledLink::from(link))
        })
    }
}
