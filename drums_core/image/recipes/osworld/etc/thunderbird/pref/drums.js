// No dialog, page or hint that nobody asked for, and nothing that goes out by itself.
pref("mail.shell.checkDefaultClient", false);
pref("mail.spotlight.firstRunDone", true);
pref("mail.provider.suppress_dialog_on_startup", true);
pref("mailnews.start_page_override.mstone", "ignore");
pref("mailnews.start_page.enabled", false);
pref("app.donation.eoy.version.viewed", 999);
pref("datareporting.policy.dataSubmissionEnabled", false);
pref("datareporting.policy.dataSubmissionPolicyBypassNotification", true);
pref("app.update.enabled", false);
pref("mail.rights.override", true);
pref("mail.rights.version", 1);
pref("browser.crashReports.unsubmittedCheck.enabled", false);
pref("toolkit.startup.max_resumed_crashes", -1);
pref("accessibility.force_disabled", -1);
