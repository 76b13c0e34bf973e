//! Ways to open a link to a server, again and again.
//!
//! Owns the trait that recovery dials with, and its form for URLs. Knows nothing of when to dial.

use std::any::Any;
use std::fmt;

use exec_server_transport::{Link, connect};
use futures_util::future::BoxFuture;

pub use crate::error::DialError;
use crate::error::ExecServerError;
use crate::options::RemoteExecServerConnectArgs;

/// Opens links to one server; a client dials once to connect and again whenever its link is lost.
///
/// Every link must lead to the server that knows the session: a program that is started for one
/// link takes its sessions with it, so starting another is no way to recover.
///
/// Functions that return a future of a [`Dialled`] are dials too:
///
/// ```no_run
/// use exec_server_client::{Dialled, ExecServerClient, ExecServerClientConnectOptions, ExecServerError};
/// use exec_server_transport::{ConnectOptions, connect};
///
/// # async fn example() -> Result<(), ExecServerError> {
/// let dial = || async {
///     let link = connect("unix:///run/exec-server.sock", &ConnectOptions::default()).await?;
///     Ok::<_, ExecServerError>(Dialled::from(link))
/// };
/// let options = ExecServerClientConnectOptions::new("example");
/// let client = ExecServerClient::connect_with(dial, options).await?;
/// # Ok(())
/// # }
/// ```
pub trait Dial: Send + Sync + 'static {
    /// Opens a link. Dropping the future gives up; it is given up when recovery runs out of time.
    ///
    /// # Errors
    ///
    /// Failures that may pass are tried again: of [`ExecServerError::Connect`] those of the network,
    /// of [`ExecServerError::Dial`] those that say so. All others end the recovery.
    fn dial(&self) -> BoxFuture<'_, Result<Dialled, ExecServerError>>;

    /// As [`Dial::dial`], for one that can send messages before it knows that there is a link: that
    /// saves a round trip. Whether it did, [`Dialled`] tells; left alone, nothing is sent.
    ///
    /// # Errors
    ///
    /// As there.
    fn dial_saying(&self, first: FirstWords) -> BoxFuture<'_, Result<Dialled, ExecServerError>> {
        drop(first);
        self.dial()
    }
}

/// Messages for a link that is not there yet.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FirstWords {
    /// Each of them, in their order.
    pub messages: Vec<Vec<u8>>,
    /// They may be said again on another link even though they may have been heard on this one.
    pub repeatable: bool,
}

impl<F, R> Dial for F
where
    F: Fn() -> R + Send + Sync + 'static,
    R: Future<Output = Result<Dialled, ExecServerError>> + Send + 'static,
{
    fn dial(&self) -> BoxFuture<'_, Result<Dialled, ExecServerError>> {
        Box::pin(self())
    }
}

/// A link that was opened, and whatever has to live as long as it.
pub struct Dialled {
    pub(crate) link: Link,
    pub(crate) keep: Option<Box<dyn Any + Send + Sync>>,
    /// The first messages have left.
    pub(crate) said: bool,
}

impl Dialled {
    /// A link that needs `keep`, such as the process behind it; dropped after the link.
    pub fn with(link: Link, keep: impl Any + Send + Sync) -> Self {
        Self {
            link,
            keep: Some(Box::new(keep)),
            said: false,
        }
    }
}

impl From<Link> for Dialled {
    fn from(link: Link) -> Self {
        Self {
            link,
            keep: None,
            said: false,
        }
    }
}

impl fmt::Debug for Dialled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialled")
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}

/// Dials a URL.
pub(crate) struct UrlDial(pub(crate) RemoteExecServerConnectArgs);

impl Dial for UrlDial {
    fn dial(&self) -> BoxFuture<'_, Result<Dialled, ExecServerError>> {
        Box::pin(async {
            let link = connect(&self.0.url, &self.0.dial()).await?;
            Ok(Dialled::from(link))
        })
    }
}
