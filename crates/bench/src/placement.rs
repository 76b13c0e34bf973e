//! On which cores this program and what it starts may run.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Everything on one core until it is dropped; threads and processes started meanwhile stay there.
#[derive(Debug)]
pub(crate) struct Placement {
    before: CpuSet,
}

impl Placement {
    /// Moves this thread to the core it is on.
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
        // It was allowed before.
        let _ = sched_setaffinity(None, &self.before);
    }
}
