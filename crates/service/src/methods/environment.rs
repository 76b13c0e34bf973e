//! Implementation of `environment/*`.

use exec_server_engine::configuration::ConfigFiles;
use exec_server_protocol::NoParams;
use exec_server_protocol::environment::{ConfigReadParams, StatusResult, StatusValue};

use crate::dispatch::CheckedRequest;

/// Reads the configuration files of this machine for clients.
pub(crate) fn config_read(call: CheckedRequest<'_>, params: ConfigReadParams) {
    let cwd = match ConfigFiles::check(&params) {
        Ok(cwd) => cwd,
        Err(error) => return call.responder.send_error(error),
    };
    let (server, responder) = (call.connection.server.clone(), call.responder);
    call.connection.file_work(move || {
        let user_home_dir = server.info().user_home_dir.clone();
        let files = &server.config().config_files;
        responder.send(files.read(&cwd, &params, user_home_dir));
    });
}

pub(crate) fn info(call: CheckedRequest<'_>, _: NoParams) {
    call.responder.send(Ok(call.connection.server.info()));
}

pub(crate) fn status(call: CheckedRequest<'_>, _: NoParams) {
    let draining = call.connection.server.draining().is_cancelled();
    call.responder.send(Ok(StatusResult {
        status: StatusValue::Ready,
        draining,
    }));
}
