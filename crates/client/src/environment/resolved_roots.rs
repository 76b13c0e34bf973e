//! Capability roots with the environments that contain them.

use std::sync::Arc;

use super::handle::Environment;
use crate::environment::roots::SelectedCapabilityRoot;

/// Selected root and the environment handle to use it with.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ResolvedCapabilityRoot {
    /// The selected root.
    pub root: SelectedCapabilityRoot,
    /// The environment, as captured by the step.
    pub environment: Arc<Environment>,
}

/// Roots that can be used now, and warnings about the others.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct RootInspection {
    /// Roots of ready environments, in order.
    pub ready_roots: Vec<ResolvedCapabilityRoot>,
    /// Reasons why other roots cannot be used, as readable text.
    pub warnings: Vec<String>,
}
