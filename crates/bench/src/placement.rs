//! CPU affinity of this program and of the processes that it starts.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Restricts everything to one core until it is dropped; new threads and processes inherit this.
#[derive(Debug)]
pub(crate) struct Placement {
    before: CpuSet,
}

impl Placement {
    /// Restricts this thread to the core that it runs on.
    pub(crate) fn one_core() -> rustix::io::Result<Self> {
        let before = sched_getaffinity(None)?;
        let mut here = CpuSet::new();
        here.set(sched_getcpu());
        sched_setaffinity(None, &here)?;
        Ok(Self { before })
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        // Cannot fail: this affinity was allowed before.
        let _ = sched_setaffinity(None, &self.before);
    }
}
