//! Wire protocol of exec-server.
//!
//! Contains the message envelope, the table of methods with their parameter and result types,
//! `file:` URIs and base64 byte strings. Uses no socket, clock, file or environment variable.

pub mod capability;
pub mod chunk;
pub mod codes;
pub mod command;
pub mod envelope;
pub mod environment;
pub mod fs;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod http;
pub mod limits;
pub mod method;
pub mod network;
mod params;
pub mod path;
pub mod process;
pub mod sandbox;
pub mod scan;
pub mod session;
pub mod table;
pub mod text;

pub use chunk::ByteChunk;
pub use envelope::{ErrorObject, IncomingMessage, RequestId};
pub use method::{Method, NoParams, NotificationMethod};
pub use path::PathUri;
pub use scan::ScanError;
pub use table::{MethodId, Scope, ServedMethod};
