//! Protocol methods, one file per family: functions that take params and send a response.

pub(crate) mod capability;
pub(crate) mod command;
pub(crate) mod environment;
pub(crate) mod fs;
pub(crate) mod handle;
pub(crate) mod http;
pub(crate) mod process;
pub(crate) mod search;
pub(crate) mod session;
pub(crate) mod watch;
