//! Turns by bytes: a task that moves much at once lets others run as often as many that move little.
//!
//! The runtime counts operations, whatever their size: a stream of long frames would otherwise be
//! served for megabytes on end while a keystroke waits.

use std::task::{Context, Poll};

use tokio::task::coop;

/// Bytes that count as one operation. With the runtime's hundred and more operations a turn is one
/// frame of the largest kind. A keystroke passes a dozen tasks on its way and waits for a turn of the
/// flood at each, so a longer one is felt; the end of a turn costs about a microsecond.
const OPERATION_BYTES: usize = 512;

/// Accounts for bytes that were moved; waits for the next turn if this one is over.
pub async fn spend(bytes: usize) {
    for _ in 0..bytes / OPERATION_BYTES {
        coop::consume_budget().await;
    }
}

/// As [`spend`], where nothing can be waited for: the turn ends before the next operation.
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

    /// Bytes that a task moves before another one, which is ready all the time, has run.
    async fn moved_by(mut step: impl AsyncFnMut()) -> usize {
        let others = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&others);
        let other = tokio::spawn(async move {
            loop {
                count.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        });
        // A turn of its own to begin with.
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
    async fn long_work_ends_a_turn_and_short_work_does_not() {
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
