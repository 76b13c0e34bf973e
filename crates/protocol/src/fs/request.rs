//! File operations as values: requests and responses.
//!
//! [`FsRequest`] and [`FsResponse`] hold the types of the wire, one variant per method. Open files,
//! watches and notifications have no variant.

use serde::Serialize;

use super::{
    Canonicalize, Copy, CreateDirectory, CreateSymlink, GetMetadata, Hash, ReadDirectory, ReadFile,
    Remove, Rename, Search, SetMetadata, Walk, WriteFile,
};
use crate::method::Method;
use crate::path::PathUri;
use crate::sandbox::Sandbox;

/// A file operation with one request and one response.
pub trait FsMethod: Method<Params: Sync + 'static, Result: 'static> + 'static {
    /// Whether the method changes files.
    const WRITES: bool;

    /// The request with these params.
    fn request(params: Self::Params) -> FsRequest;

    /// The response with this result.
    fn response(result: Self::Result) -> FsResponse;

    /// The result, if the response is one of this method.
    fn result(response: FsResponse) -> Option<Self::Result>;
}

/// Function that is applied to a request of any method.
pub trait FsVisitor {
    /// Result type of a visit.
    type Output;

    /// Visits the params of one method.
    fn visit<M: FsMethod>(self, params: M::Params) -> Self::Output;
}

/// The table of operations: method, whether it changes files, and the params that are paths.
macro_rules! operations {
    ($($name:ident $effect:ident $($path:ident),+;)*) => {
        /// One file operation: the params of its method.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[serde(untagged)]
        pub enum FsRequest {$(
            #[doc = concat!("Of [`", stringify!($name), "`](enum@super::", stringify!($name), ").")]
            $name(<$name as Method>::Params),
        )*}

        /// Result of a file operation: that of its method.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[serde(untagged)]
        pub enum FsResponse {$(
            #[doc = concat!("Of [`", stringify!($name), "`](enum@super::", stringify!($name), ").")]
            $name(<$name as Method>::Result),
        )*}

        $(impl FsMethod for $name {
            const WRITES: bool = operations!(@ $effect);

            fn request(params: Self::Params) -> FsRequest {
                FsRequest::$name(params)
            }

            fn response(result: Self::Result) -> FsResponse {
                FsResponse::$name(result)
            }

            fn result(response: FsResponse) -> Option<Self::Result> {
                match response {
                    FsResponse::$name(result) => Some(result),
                    _ => None,
                }
            }
        })*

        impl FsRequest {
            /// The name of the method on the wire.
            pub fn method(&self) -> &'static str {
                match self {$(
                    Self::$name(_) => $name::NAME,
                )*}
            }

            /// Whether the operation changes files.
            pub fn writes(&self) -> bool {
                match self {$(
                    Self::$name(_) => $name::WRITES,
                )*}
            }

            /// The sandbox policy of the operation.
            pub fn sandbox_mut(&mut self) -> &mut Option<Sandbox> {
                match self {$(
                    Self::$name(params) => &mut params.sandbox,
                )*}
            }

            /// The paths in the params, the first one first.
            pub fn paths_mut(&mut self) -> Vec<&mut PathUri> {
                match self {$(
                    Self::$name(params) => vec![$(&mut params.$path),+],
                )*}
            }

            /// Calls the visitor with the params of the method.
            pub fn visit<V: FsVisitor>(self, visitor: V) -> V::Output {
                match self {$(
                    Self::$name(params) => visitor.visit::<$name>(params),
                )*}
            }

            /// Decodes the params of a method; `None` if the method is not one of these operations.
            pub fn decode(method: &str, params: &str) -> Option<serde_json::Result<Self>> {
                Some(match method {
                    $($name::NAME => serde_json::from_str(params).map(Self::$name),)*
                    _ => return None,
                })
            }

            /// Decodes the result of this request.
            ///
            /// # Errors
            ///
            /// When the text is not a result of the method.
            pub fn decode_response(&self, result: &str) -> serde_json::Result<FsResponse> {
                match self {$(
                    Self::$name(_) => serde_json::from_str(result).map(FsResponse::$name),
                )*}
            }
        }
    };
    (@ reads) => { false };
    (@ writes) => { true };
}

operations! {
    ReadFile reads path;
    WriteFile writes path;
    GetMetadata reads path;
    CreateDirectory writes path;
    Canonicalize reads path;
    ReadDirectory reads path;
    Walk reads path;
    Remove writes path;
    Copy writes source_path, destination_path;
    Rename writes from, to;
    SetMetadata writes path;
    CreateSymlink writes path;
    Hash reads path;
    Search reads path;
}

impl FsRequest {
    /// Returns the params as JSON.
    pub fn encode(&self) -> String {
        text(self)
    }
}

impl FsResponse {
    /// Returns the result as JSON.
    pub fn encode(&self) -> String {
        text(self)
    }

    /// The paths in the params.
    pub fn paths_mut(&mut self) -> Vec<&mut PathUri> {
        match self {
            Self::Canonicalize(result) => vec![&mut result.path],
            Self::ReadDirectory(result) => {
                let entries = result.entries.iter_mut();
                entries.filter_map(|entry| entry.path.as_mut()).collect()
            }
            Self::Walk(result) => {
                let entries = result.entries.iter_mut().map(|entry| &mut entry.path);
                let errors = result.errors.iter_mut().map(|error| &mut error.path);
                entries.chain(errors).collect()
            }
            Self::Search(result) => {
                let matches = result.matches.iter_mut();
                matches.map(|found| &mut found.path).collect()
            }
            _ => Vec::new(),
        }
    }
}

fn text(value: &impl Serialize) -> String {
    let text = serde_json::to_string(value);
    debug_assert!(text.is_ok(), "types of the wire always serialise");
    text.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_request_and_response_survives_its_text() {
        let path = "file:///a";
        for (method, params, result) in [
            ("fs/readFile", json!({}), json!({"dataBase64": "eA=="})),
            (
                "fs/writeFile",
                json!({"dataBase64": "", "mode": 0o600}),
                json!({}),
            ),
            (
                "fs/getMetadata",
                json!({"followSymlinks": false}),
                json!({"isDirectory": false, "isFile": true, "isSymlink": false, "size": 1,
                       "createdAtMs": 2, "modifiedAtMs": 3, "mode": 4}),
            ),
            ("fs/createDirectory", json!({"recursive": false}), json!({})),
            ("fs/canonicalize", json!({}), json!({"path": path})),
            (
                "fs/readDirectory",
                json!({"links": true}),
                json!({"entries": [{"fileName": "x", "isDirectory": false, "isFile": true,
                       "path": path}]}),
            ),
            (
                "fs/walk",
                json!({"options": {"maxDepth": 1, "maxDirectories": 2, "maxEntries": 3,
                       "followDirectorySymlinks": true}}),
                json!({"entries": [{"path": path, "kind": "file"}], "errors": [],
                       "truncated": true}),
            ),
            ("fs/remove", json!({"force": false}), json!({})),
            ("fs/setMetadata", json!({"modifiedAtMs": -1}), json!({})),
            ("fs/createSymlink", json!({"target": "b"}), json!({})),
            (
                "fs/hash",
                json!({"length": 9}),
                json!({"sha256": "00", "length": 0}),
            ),
            (
                "fs/search",
                json!({"pattern": "x", "globs": ["*.rs"]}),
                json!({"matches": [], "filesSearched": 1, "truncated": false}),
            ),
        ] {
            let mut params = params;
            params["path"] = path.into();
            let request = FsRequest::decode(method, &params.to_string());
            let mut request = request.unwrap().unwrap();
            assert_eq!(request.method(), method);
            assert_eq!(request.paths_mut().len(), 1);
            let again = FsRequest::decode(method, &request.encode());
            assert_eq!(again.unwrap().unwrap(), request);
            let response = request.decode_response(&result.to_string()).unwrap();
            assert_eq!(
                request.decode_response(&response.encode()).unwrap(),
                response
            );
        }
        for (method, from, to) in [
            ("fs/copy", "sourcePath", "destinationPath"),
            ("fs/rename", "from", "to"),
        ] {
            let params = json!({from: path, to: "file:///b", "recursive": true});
            let request = FsRequest::decode(method, &params.to_string());
            let mut request = request.unwrap().unwrap();
            assert!(request.writes());
            let paths = request.paths_mut();
            let paths: Vec<_> = paths.iter().map(|path| path.as_str()).collect();
            assert_eq!(paths, [path, "file:///b"]);
        }
        assert!(FsRequest::decode("fs/open", "{}").is_none());
        assert!(FsRequest::decode("fs/hash", "{}").unwrap().is_err());
    }
}
