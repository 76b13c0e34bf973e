//! Cooperative yielding by bytes moved (tokio coop budget).
//!
//! Tokio counts operations, whatever their size. A stream of long frames would otherwise run for
//! megabytes before it yields, while a keystroke waits.

use std::task::{Context, Poll};

use tokio::task::coop;

/// Number of bytes that count as one operation. With tokio's budget of 128 operations, a task moves
/// about 64 KiB before it yields. A keystroke passes through a dozen tasks and may wait for the
/// bulk transfer at each of them, so a larger budget adds a noticeable delay; one yield costs about
/// a microsecond.
const OPERATION_BYTES: usize = 512;

/// Charges the task's budget for bytes that were moved; yields if the budget is used up.
pub async fn spend(bytes: usize) {
    for _ in 0..bytes / OPERATION_BYTES {
        coop::consume_budget().await;
    }
}

/// Like [`spend`], for code that cannot await: the task yields at its next operation.
pub fn charge(cx: &mut Context<'_>, bytes: usize) {
    for _ in 0..bytes / OPERATION_BYTES {
        match coop::poll_proceed(cx) {
            Poll::Ready(operation) => operation.made_progress(),
            Poll::Pending => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Returns how many bytes a task moves before another task that is always ready has run.
    async fn moved_by(mut step: impl AsyncFnMut()) -> usize {
        let others = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&others);
        let other = tokio::spawn(async move {
            loop {
                count.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        });
        // Begin with a full budget.
        tokio::task::yield_now().await;
        let before = others.load(Ordering::Relaxed);
        let mut steps = 0;
        while others.load(Ordering::Relaxed) == before {
            step().await;
            steps += 1;
            assert!(steps < 1000, "the other never runs");
        }
        other.abort();
        steps
    }

    #[tokio::test]
    async fn large_transfers_yield_and_small_ones_do_not() {
        let long = moved_by(async || spend(60 << 10).await).await;
        assert!((1..10).contains(&long), "{long}");
        let short = moved_by(async || spend(4 << 10).await).await;
        assert!(short > 4 * long, "{short}");
        let polled = moved_by(async || {
            poll_fn(|cx| {
                let operation = std::task::ready!(coop::poll_proceed(cx));
                operation.made_progress();
                charge(cx, 60 << 10);
                Poll::Ready(())
            })
            .await;
        });
        let polled = polled.await;
        assert!((1..10).contains(&polled), "{polled}");
    }
}
