//! Environments: local or remote machines addressed by id.
//!
//! Contains the definitions ([`EnvironmentsFile`], [`ConfiguredEnvironments`]), the connection
//! targets ([`connect`]), the shared handles ([`EnvironmentManager`], [`Environment`]) and the
//! snapshot that one agent step uses ([`EnvironmentStep`]).
// The guide is outside of this package; its examples are tested as doctests.
#![cfg_attr(doctest, doc = include_str!("../../../../docs/embedding.md"))]

pub mod connect;
mod discovery;
mod file;
mod files;
mod handle;
mod id;
mod lazy;
#[cfg(feature = "local")]
mod local;
mod manager;
mod provisioning;
#[cfg(feature = "registry")]
mod registry;
mod resolved_roots;
mod roots;
mod run;
mod source;
mod step;

pub use discovery::{CapabilityCache, DiscoveredRoots};
pub use file::{
    DefaultEnvironment, EnvironmentEntry, EnvironmentsFile, EnvironmentsFileError, FILE_NAME,
};
pub use handle::{Environment, EnvironmentStatus};
pub use id::{EnvironmentIdError, LOCAL, REMOTE};
pub use lazy::Readiness;
pub use manager::{EnvironmentError, EnvironmentManager};
pub use provisioning::{ReadyReport, ReportError};
pub use resolved_roots::{ResolvedCapabilityRoot, RootInspection};
pub use roots::{
    CapabilityRootLocation, CapabilitySelection, MAX_SELECTED_CAPABILITY_ROOTS, MergedRoots,
    RootOwner, SelectedCapabilityRoot, merge_roots,
};
pub use source::{
    ConfiguredEnvironments, EnvironmentList, EnvironmentProvider, EnvironmentSourceError,
    HOME_VARIABLE, URL_VARIABLE,
};
pub use step::{Attachments, CapturedEnvironment, EnvironmentStep};
