//! Names of the extensions that this client makes use of, as `environment/info` lists them.

use exec_server_protocol::Method;
use exec_server_protocol::{process, session};

pub(crate) const SESSION_END: &str = session::End::NAME;
pub(crate) const CLOSE_STDIN: &str = process::CloseStdin::NAME;
pub(crate) const RESIZE: &str = process::Resize::NAME;
pub(crate) const WAIT: &str = process::Wait::NAME;
pub(crate) const SNAPSHOT: &str = process::Snapshot::NAME;
pub(crate) const LIST: &str = process::List::NAME;
/// `delivery` of `process/start`.
pub(crate) const DELIVERY: &str = "process/start#delivery";
/// `scope` of `process/signal`; it came together with the signals beside `interrupt`.
pub(crate) const SIGNAL_SCOPE: &str = "process/signal#scope";
/// `mode` of `process/terminate`.
pub(crate) const TERMINATE_MODE: &str = "process/terminate#mode";
/// `wait` of `process/terminate`.
pub(crate) const TERMINATE_WAIT: &str = "process/terminate#wait";
/// `evicted` in the result of `process/read`.
pub(crate) const READ_EVICTED: &str = "process/read#evicted";
