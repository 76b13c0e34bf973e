//! Where things run, as a value.
//!
//! Owns which environments there are ([`EnvironmentsFile`], [`ConfiguredEnvironments`]) and the
//! ways to reach them ([`connect`]).

pub mod connect;
mod file;
mod id;
mod source;

pub use file::{
    DefaultEnvironment, EnvironmentEntry, EnvironmentsFile, EnvironmentsFileError, FILE_NAME,
};
pub use id::{EnvironmentIdError, LOCAL, REMOTE};
pub use source::{
    ConfiguredEnvironments, EnvironmentList, EnvironmentProvider, EnvironmentSourceError,
    HOME_VARIABLE, URL_VARIABLE,
};
