//! Control of an executor's connection: suspend, resume, replace, and renew credentials.
//!
//! Sessions and processes are not affected; `attend` applies the changes.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use exec_server_sync::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Why credentials cannot be renewed.
type RenewalError = Box<dyn std::error::Error + Send + Sync>;

type Renewing = Pin<Box<dyn Future<Output = Result<(), RenewalError>> + Send>>;

/// Source of new credentials, called before each connection to the rendezvous server.
#[derive(Clone)]
pub struct Renewal(Arc<dyn Fn() -> Renewing + Send + Sync>);

impl Renewal {
    /// Creates a source from a function that stores a new credential where the registry client
    /// reads it.
    pub fn new<F>(renew: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), RenewalError>> + Send + 'static,
    {
        Self(Arc::new(move || Box::pin(renew())))
    }

    pub(super) fn renew(&self) -> impl Future<Output = Result<(), RenewalError>> + Send + use<> {
        (self.0)()
    }
}

impl fmt::Debug for Renewal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Renewal")
    }
}

/// Switch for the connection of an environment; clones control the same connection.
#[derive(Debug, Clone, Default)]
pub struct Control {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    suspended: watch::Sender<bool>,
    /// Cancelled to close the current socket.
    socket: Mutex<CancellationToken>,
}

impl Control {
    /// Closes the connection; no other is opened until [`Control::resume`].
    pub fn suspend(&self) {
        self.inner.suspended.send_replace(true);
        self.reconnect();
    }

    /// Allows connections again.
    pub fn resume(&self) {
        self.inner.suspended.send_replace(false);
    }

    /// Replaces the connection, for example because the machine was stopped for a while.
    pub fn reconnect(&self) {
        self.inner.socket.lock().cancel();
    }

    /// Waits until connections are allowed.
    pub(super) async fn resumed(&self) {
        let mut suspended = self.inner.suspended.subscribe();
        // The sender lives as long as `self`.
        let _ = suspended.wait_for(|suspended| !suspended).await;
    }

    /// Returns the token that ends a socket that was just opened.
    pub(super) fn opened(&self) -> CancellationToken {
        let token = CancellationToken::new();
        *self.inner.socket.lock() = token.clone();
        // The connection may have been suspended while the socket was opened.
        if *self.inner.suspended.borrow() {
            token.cancel();
        }
        token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether connections are allowed now.
    async fn is_resumed(control: &Control) -> bool {
        tokio::select! {
            biased;
            () = control.resumed() => true,
            () = std::future::ready(()) => false,
        }
    }

    #[tokio::test]
    async fn suspend_closes_the_socket_and_blocks_the_next_until_resume() {
        let control = Control::default();
        let first = control.opened();
        assert!(is_resumed(&control).await);
        control.suspend();
        assert!(first.is_cancelled());
        assert!(!is_resumed(&control).await);
        // A socket that was being opened meanwhile is closed immediately.
        assert!(control.opened().is_cancelled());
        control.resume();
        assert!(is_resumed(&control).await);
        let second = control.opened();
        assert!(!second.is_cancelled());
        control.reconnect();
        assert!(second.is_cancelled());
    }
}
