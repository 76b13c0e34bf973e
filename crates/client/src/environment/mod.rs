//! Where things run, as a value.
//!
//! Owns which environments there are ([`EnvironmentsFile`], [`ConfiguredEnvironments`]), the ways to
//! reach them ([`connect`]), the handles that everybody shares ([`EnvironmentManager`],
//! [`Environment`]) and what one step of work sees of them ([`Step`]).
#![doc = include_str!("../../../../docs/embedding.md")]

pub mod connect;
mod discovery;
mod file;
mod files;
mod gate;
mod handle;
mod id;
mod lazy;
#[cfg(feature = "local")]
mod local;
mod manager;
#[cfg(feature = "registry")]
mod registry;
mod roots;
mod source;
mod step;

pub use discovery::{CapabilityCache, DiscoveredRoots};
pub use file::{
    DefaultEnvironment, EnvironmentEntry, EnvironmentsFile, EnvironmentsFileError, FILE_NAME,
};
pub use gate::{ReadyReport, ReportError};
pub use handle::{Environment, EnvironmentStatus};
pub use id::{EnvironmentIdError, LOCAL, REMOTE};
pub use lazy::Readiness;
pub use manager::{EnvironmentError, EnvironmentManager};
pub use roots::{
    CapabilityRootLocation, CapabilitySelection, MAX_SELECTED_CAPABILITY_ROOTS, MergedRoots,
    ResolvedCapabilityRoot, RootInspection, RootOwner, SelectedCapabilityRoot, merge_roots,
};
pub use source::{
    ConfiguredEnvironments, EnvironmentList, EnvironmentProvider, EnvironmentSourceError,
    HOME_VARIABLE, URL_VARIABLE,
};
pub use step::{Attachments, Captured, Step};
